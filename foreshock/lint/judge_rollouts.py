"""Judge tokens that are half there, masks, and rollouts that are there twice."""

from __future__ import annotations

import math

import numpy as np

from foreshock.lint.evidence import LintEvidence
from foreshock.lint.findings import FALSE_ALARM, Clean, Finding, NotChecked, Outcome, number

__all__ = ["judge_dropped", "judge_duplicates", "judge_masked", "judge_without_engine"]

# "Always": of the tokens of the id, and of all tokens that were hit.
_NEARLY_ALL = 0.9
# NaN and −inf have other causes too: so few of one id say nothing of it.
_LEAST_NON_FINITE = 3
_LEAST_WITHOUT_ENGINE = 4
# A token that μ was certain of is likely under π as well; one that nobody asked the engine about is not.
_CERTAIN_LOG_PI = -0.2
# A place says nothing where most tokens stand there.
_MOST_AT_A_PLACE = 0.6
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
        non_finite = column == 0 and lost <= evidence.count("trainer_nan") + evidence.count("trainer_minus_inf")
        if non_finite and hit < _LEAST_NON_FINITE:
            continue
        if hit >= _NEARLY_ALL * total and hit >= _NEARLY_ALL * there:
            place = _place(evidence, "dropped", total) if column == 0 else ""
            seen = (
                f"Token id {int(ids[slot])} was sampled {there:,} times with a real log μ, and {hit:,} of these have "
                f"{what}{place}; {total - hit:,} tokens of other ids do."
            )
            numbers = {"token_id": float(ids[slot]), "sampled": there, "dropped": hit, "dropped_of_others": total - hit}
            where = tuple(each for each in evidence.where(one) if each.text.startswith(f"id {int(ids[slot])},"))
            return Finding(one, "bad", seen, numbers, where), rest
    # NaN and −inf have a warning of their own.
    zeros = lost - evidence.count("trainer_nan") - evidence.count("trainer_minus_inf")
    if zeros > 0:
        seen = (
            f"{zeros:,} tokens of {ids.size:,} ids have log π = 0 while log μ is below −0.5"
            f"{_place(evidence, 'dropped', lost)}."
        )
        rest = Finding(many, "bad", seen, {"tokens": zeros, "token_ids": ids.size})
    return Clean(one), rest


def judge_without_engine(evidence: LintEvidence) -> Outcome:
    """log μ is 0 where nobody asked the engine: padding that the trainer scored, ends, a prompt's last token."""
    check = "tokens_without_engine"
    missing = evidence.count("no_mu")
    if not evidence.count("paired"):
        return NotChecked(check, "needs rollout_log_probs and trainer_log_probs")
    if missing < _LEAST_WITHOUT_ENGINE or evidence.sum("no_mu_log_pi") > _CERTAIN_LOG_PI * missing:
        return Clean(check)
    where = _place(evidence, "no_mu", missing)
    trailing = evidence.count("no_mu_trailing")
    if trailing >= _NEARLY_ALL * missing and evidence.count("no_mu_last") < _NEARLY_ALL * missing:
        where = ", in rows up to the end of their response: padding that the trainer scored"
    if not where:
        return Clean(check)
    seen = f"{missing:,} tokens have log μ = 0 exactly, and a log π of {number(evidence.sum('no_mu_log_pi') / missing)}"
    numbers = {name: evidence.count(name) for name in ("no_mu", "no_mu_first", "no_mu_last", "no_mu_trailing")}
    return Finding(check, "bad", f"{seen} on average{where}.", numbers)


def _place(evidence: LintEvidence, counted: str, total: int) -> str:
    """Words for tokens that nearly all stand first, or last, in their responses; empty where they do not."""
    if evidence.count("rollouts") > _MOST_AT_A_PLACE * evidence.count("tokens"):
        return ""
    if evidence.count(f"{counted}_last") >= _NEARLY_ALL * total:
        return ", each the last token of its response: the end of sequence"
    if evidence.count(f"{counted}_first") >= _NEARLY_ALL * total:
        return ", each the first token of its response: the prompt's last token, or one cut too early"
    return ""


def judge_masked(evidence: LintEvidence, dropped: Outcome) -> Outcome:
    """Masked tokens with a log μ or an advantage."""
    check = "masked_values"
    tool = evidence.count("tool_tokens")
    if not tool:
        return Clean(check, "no token is masked")
    numbers = {name: evidence.count(f"masked_{name}") for name in ("rollout", "advantage", "trainer", "entropy")}
    if isinstance(dropped, Finding) and numbers["rollout"] <= int(evidence.dropped.counts[:, 1].sum()):
        numbers["rollout"] = 0
    if not (numbers["rollout"] or numbers["advantage"]):
        return Clean(check)
    words = {"rollout": "a log μ", "advantage": "an advantage", "trainer": "a log π", "entropy": "an entropy"}
    told = ", ".join(f"{numbers[name]:,} have {word}" for name, word in words.items() if numbers[name])
    seen = f"Of {tool:,} masked tokens, {told} other than 0."
    return Finding(check, "look", seen, {"masked": tool, **numbers})


def judge_duplicates(evidence: LintEvidence, *, law_known: bool = True) -> Outcome:
    """More equal rollouts than chance explains, where log μ says what chance is (`law_known`)."""
    check = "duplicated_rollouts"
    marks = evidence.marks
    if not marks.prompts.size:
        several = "looked for within a step, not across steps"
        return NotChecked(check, several if evidence.count("rollout_logged") else _NO_MU)
    if evidence.count("uncomparable_sampling") or not law_known:
        return NotChecked(check, "log μ may not be the law that sampled: the chance of equal responses is not known")
    log_chance, level = min((_log_chance(*marks.repeats(level)), level) for level in _LEVELS)
    if log_chance > math.log(FALSE_ALARM / len(_LEVELS)):
        return Clean(check)
    repeated, expected = marks.repeats(level)
    # Copies of a batch, or temperature 0: the data do not say which.
    one = np.unique(marks.contents).size == np.unique(marks.prompts).size < marks.prompts.size
    greedy = "; no prompt has two different responses: if sampling was greedy, declare temperature 0" if one else ""
    unlikely = f" that are no likelier than {number(math.exp(level))}" if level else ""
    seen = (
        f"{repeated:,} of {marks.prompts.size:,} rollouts equal another one of their prompt in every token and in "
        f"every bit of log μ{unlikely}; chance makes {number(expected)}{greedy}."
    )
    return Finding(check, "look", seen, {"repeated": repeated, "expected": expected, "rollouts": marks.prompts.size})


def _log_chance(repeated: int, expected: float) -> float:
    """Chernoff's bound of the log of the chance of so many repeats: that of a Poisson tail, which holds for any sum of
    chances that depend on the past (Freedman 1975)."""
    expected = max(expected, 1e-300)
    return repeated - expected - repeated * math.log(repeated / expected) if repeated > expected else 0.0
