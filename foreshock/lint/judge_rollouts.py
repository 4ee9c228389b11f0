"""Judge tokens that are half there, masks, and rollouts that are there twice."""

from __future__ import annotations

import math
from collections.abc import Sequence

from foreshock.lint.evidence import LintEvidence
from foreshock.lint.findings import FALSE_ALARM, Clean, Finding, NotChecked, Outcome, number

__all__ = ["judge_dropped", "judge_duplicates", "judge_masked"]

# "Always": of the tokens of the id, and of all tokens that were hit.
_NEARLY_ALL = 0.9
_NO_MU = "needs rollout_log_probs"
# Repeats are counted among all responses, and among those whose log μ is at most this.
_LEVELS = (0.0, -1.0, -2.0, -4.0, -6.0, -8.0, -12.0, -16.0, -32.0, -64.0)


def judge_dropped(evidence: LintEvidence) -> tuple[Outcome, Outcome]:
    """A sampled id that the trainer drops; sampled tokens of many ids without a log π."""
    one, many = "pad_id_sampled", "tokens_without_trainer"
    if not evidence.count("rollout_logged"):
        return NotChecked(one, _NO_MU), NotChecked(many, _NO_MU)
    ids, counts = evidence.dropped.ids, evidence.dropped.counts
    lost, masked = (int(counts[:, column].sum()) for column in (0, 1))
    no_target = not evidence.count("trainer_logged")
    rest: Outcome = NotChecked(many, "needs trainer_log_probs") if no_target else Clean(many)
    for column, total, what in ((0, lost, "no log π (0, NaN or −inf)"), (1, masked, "mask 0")):
        if not total:
            continue
        slot = int(counts[:, column].argmax())
        hit, there = int(counts[slot, column]), int(counts[slot, 2])
        if column == 0:
            there -= int(counts[slot, 1])
        if hit >= _NEARLY_ALL * total and hit >= _NEARLY_ALL * there:
            seen = (
                f"Token id {int(ids[slot])} was sampled {there:,} times with a real log μ, and {hit:,} of these have "
                f"{what}; {total - hit:,} tokens of other ids do."
            )
            numbers = {"token_id": float(ids[slot]), "sampled": there, "dropped": hit, "dropped_of_others": total - hit}
            where = tuple(each for each in evidence.where(one) if each.text.startswith(f"id {int(ids[slot])},"))
            return Finding(one, "bad", seen, numbers, where), rest
    # NaN and −inf have a warning of their own.
    zeros = lost - evidence.count("trainer_nan") - evidence.count("trainer_minus_inf")
    if zeros > 0:
        seen = f"{zeros:,} tokens of {ids.size:,} ids have log π = 0 while log μ is below −0.5."
        rest = Finding(many, "bad", seen, {"tokens": zeros, "token_ids": ids.size})
    return Clean(one), rest


def judge_masked(evidence: LintEvidence, dropped: Sequence[Outcome]) -> Outcome:
    """Masked tokens with a log μ or an advantage."""
    check = "masked_values"
    tool = evidence.count("tool_tokens")
    if not tool:
        return Clean(check, "no token is masked")
    numbers = {name: evidence.count(f"masked_{name}") for name in ("rollout", "advantage", "trainer", "entropy")}
    explained = any(isinstance(found, Finding) and found.check == "pad_id_sampled" for found in dropped)
    if explained and numbers["rollout"] <= int(evidence.dropped.counts[:, 1].sum()):
        numbers["rollout"] = 0
    if not (numbers["rollout"] or numbers["advantage"]):
        return Clean(check)
    words = {"rollout": "a log μ", "advantage": "an advantage", "trainer": "a log π", "entropy": "an entropy"}
    told = ", ".join(f"{numbers[name]:,} have {word}" for name, word in words.items() if numbers[name])
    seen = f"Of {tool:,} masked tokens, {told} other than 0."
    return Finding(check, "look", seen, {"masked": tool, **numbers})


def judge_duplicates(evidence: LintEvidence) -> Outcome:
    """More equal rollouts than chance explains."""
    check = "duplicated_rollouts"
    marks = evidence.marks
    if not marks.prompts.size:
        several = "looked for within a step, not across steps"
        return NotChecked(check, several if evidence.count("rollout_logged") else _NO_MU)
    if evidence.count("uncomparable_sampling"):
        return NotChecked(check, "sampling was sharper than log μ says, so the chance of equal responses is not known")
    log_chance, level = min((_log_chance(*marks.repeats(level)), level) for level in _LEVELS)
    if log_chance > math.log(FALSE_ALARM / len(_LEVELS)):
        return Clean(check)
    repeated, expected = marks.repeats(level)
    unlikely = f" that are no likelier than {number(math.exp(level))}" if level else ""
    seen = (
        f"{repeated:,} of {marks.prompts.size:,} rollouts equal another one of their prompt in every token and in "
        f"every bit of log μ{unlikely}; chance makes {number(expected)}."
    )
    return Finding(check, "look", seen, {"repeated": repeated, "expected": expected, "rollouts": marks.prompts.size})


def _log_chance(repeated: int, expected: float) -> float:
    """Chernoff's bound of the log of the chance of so many repeats: that of a Poisson tail, which holds for any sum of
    chances that depend on the past (Freedman 1975)."""
    expected = max(expected, 1e-300)
    return repeated - expected - repeated * math.log(repeated / expected) if repeated > expected else 0.0
