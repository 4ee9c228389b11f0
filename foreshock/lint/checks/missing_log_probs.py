"""Check for tokens with one log-prob missing, and for masked tokens that carry values."""

from __future__ import annotations

from foreshock.lint.checks.outcomes import Clean, Finding, NotChecked, Outcome
from foreshock.lint.evidence.lint_evidence import LintEvidence
from foreshock.lint.formatting import format_number

__all__ = ["check_masked_values", "check_missing_engine", "check_missing_trainer"]

# This share counts as all: of the tokens of an id, and of all tokens without the log-prob.
_NEARLY_ALL = 0.9
# NaN and −inf have other causes too: fewer at one id are no evidence against the id.
_LEAST_NON_FINITE = 3
_LEAST_WITHOUT_ENGINE = 4
# The mean log π of tokens that μ is certain of is above this; that of tokens that the engine did not score is below.
_CERTAIN_LOG_PI = -0.2
# If more of all tokens than this are the first (or last) of their response, the position is no evidence.
_MOST_AT_A_PLACE = 0.6
_NO_MU = "needs rollout_log_probs"


def check_missing_trainer(evidence: LintEvidence) -> tuple[Outcome, Outcome]:
    """Check for a sampled token id that the trainer drops, and for sampled tokens of many ids without a log π."""
    one, many = "pad_id_sampled", "tokens_without_trainer"
    if not evidence.count("rollout_logged"):
        return NotChecked(one, _NO_MU), NotChecked(many, _NO_MU)
    ids, counts = evidence.missing.ids, evidence.missing.counts
    missing, masked = (int(counts[:, column].sum()) for column in (0, 1))
    no_target = not evidence.count("trainer_logged")
    rest: Outcome = NotChecked(many, "needs trainer_log_probs") if no_target else Clean(many)
    for column, total, what in ((0, missing, "no log π (0, NaN or −inf)"), (1, masked, "mask 0")):
        if not total:
            continue
        slot = int(counts[:, column].argmax())
        affected, sampled = int(counts[slot, column]), int(counts[slot, 2])
        if column == 0:
            sampled -= int(counts[slot, 1])
        non_finite = column == 0 and missing <= evidence.count("trainer_nan") + evidence.count("trainer_minus_inf")
        if non_finite and affected < _LEAST_NON_FINITE:
            continue
        if affected >= _NEARLY_ALL * total and affected >= _NEARLY_ALL * sampled:
            token_id, others = int(ids[slot]), total - affected
            place = _place(evidence, "missing" if column == 0 else "dropped", total)
            place += " (or the mask is shifted by one token)" if column == 1 and place else ""
            seen = (
                f"{affected:,} of {sampled:,} tokens of id {token_id} with a real log μ have {what}{place}; {others:,} "
                "tokens of other ids do."
            )
            numbers = {"token_id": float(token_id), "sampled": sampled, "dropped": affected}
            where = tuple(each for each in evidence.where(one) if each.text.startswith(f"id {token_id},"))
            return Finding(one, "critical", seen, {**numbers, "dropped_of_others": others}, where), rest
    # NaN and −inf have a check of their own.
    zeros = missing - evidence.count("trainer_nan") - evidence.count("trainer_minus_inf")
    if zeros > 0:
        seen = (
            f"{zeros:,} tokens of {ids.size:,} ids have log π = 0 while log μ is below −0.5"
            f"{_place(evidence, 'missing', missing)}."
        )
        rest = Finding(many, "critical", seen, {"tokens": zeros, "token_ids": ids.size})
    return Clean(one), rest


def check_missing_engine(evidence: LintEvidence) -> Outcome:
    """Check for tokens that the engine did not score (log μ = 0): padding, ends, or a prompt's last token."""
    check = "tokens_without_engine"
    missing = evidence.count("no_mu")
    if not evidence.count("paired"):
        return NotChecked(check, "needs rollout_log_probs and trainer_log_probs")
    if missing < _LEAST_WITHOUT_ENGINE or evidence.sum("no_mu_log_pi") > _CERTAIN_LOG_PI * missing:
        return Clean(check)
    place = _place(evidence, "no_mu", missing)
    trailing = evidence.count("no_mu_trailing")
    if trailing >= _NEARLY_ALL * missing and evidence.count("no_mu_last") < _NEARLY_ALL * missing:
        place = ", in runs up to the end of their response: padding that the trainer scored"
    if not place:
        return Clean(check)
    mean_log_pi = format_number(evidence.sum("no_mu_log_pi") / missing)
    seen = f"{missing:,} tokens have log μ = 0 exactly, and a mean log π of {mean_log_pi}{place}."
    numbers = {name: evidence.count(name) for name in ("no_mu", "no_mu_first", "no_mu_last", "no_mu_trailing")}
    return Finding(check, "critical", seen, numbers)


def check_masked_values(evidence: LintEvidence, pad_id: Outcome) -> Outcome:
    """Check for masked tokens with a log μ or an advantage; those of a `pad_id` finding are not counted again."""
    check = "masked_values"
    masked = evidence.count("tool_tokens")
    if not masked:
        return Clean(check, "no token is masked")
    numbers = {name: evidence.count(f"masked_{name}") for name in ("rollout", "advantage", "trainer", "entropy")}
    if isinstance(pad_id, Finding) and numbers["rollout"] <= int(evidence.missing.counts[:, 1].sum()):
        numbers["rollout"] = 0
    if not (numbers["rollout"] or numbers["advantage"]):
        return Clean(check)
    values = {"rollout": "a log μ", "advantage": "an advantage", "trainer": "a log π", "entropy": "an entropy"}
    counted = ", ".join(f"{numbers[name]:,} have {value}" for name, value in values.items() if numbers[name])
    return Finding(
        check, "warning", f"Of {masked:,} masked tokens, {counted} other than 0.", {"masked": masked, **numbers}
    )


def _place(evidence: LintEvidence, counted: str, total: int) -> str:
    """Return a clause if nearly all the tokens are the last, or the first, of their responses; else an empty string."""
    if evidence.count("rollouts") > _MOST_AT_A_PLACE * evidence.count("tokens"):
        return ""
    if evidence.count(f"{counted}_last") >= _NEARLY_ALL * total:
        return ", each the last token of its response: the end of sequence"
    if evidence.count(f"{counted}_first") >= _NEARLY_ALL * total:
        return ", each the first token of its response: the prompt's last token, or one cut too early"
    return ""
