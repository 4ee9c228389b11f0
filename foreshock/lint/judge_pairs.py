"""Judge pairs of log-probs: the same numbers, a mean ratio off 1, a shift by one token."""

from __future__ import annotations

import math

from foreshock.lint.evidence import LintEvidence
from foreshock.lint.findings import FALSE_ALARM, Clean, Finding, NotChecked, Outcome, number, percent
from foreshock.lint.report import Severity
from foreshock.measures.intervals import student_t_quantile

__all__ = ["LEAST_GROUPS", "judge_equal", "judge_ratio", "judge_shift"]

# Student's t with fewer degrees of freedom has no power left at such small chances.
LEAST_GROUPS = 4
_LEAST_UNCERTAIN = 20
# Mismatch of the published sizes moves mean ρ by less than 0.1 %; a mixture of experts at its worst by about 1 %.
_LEAST_RATIO_ERROR = 0.02
_LEAST_CERTAIN = 20
_CERTAIN_SHARE = 0.01
_ONE_SIDED = 0.2
_LEAST_SHIFT_TOKENS = 50
_LEAST_SHIFT_ROLLOUTS = 4
_SHIFT_FACTOR = 0.5
_SHIFT_SHARE = 0.6
_LEAST_GAP = 0.01

_NO_PAIRS = "needs rollout_log_probs and trainer_log_probs"


def judge_equal(evidence: LintEvidence) -> Outcome:
    """Every difference is exactly 0."""
    check = "identical_log_probs"
    paired, uncertain = evidence.count("paired"), evidence.count("uncertain")
    if not paired:
        return NotChecked(check, _NO_PAIRS)
    if evidence.count("equal") < paired:
        return Clean(check)
    if uncertain < _LEAST_UNCERTAIN:
        return NotChecked(check, f"fewer than {_LEAST_UNCERTAIN} uncertain tokens: certain ones agree anyway")
    bypass = evidence.count("declared_bypass") == evidence.count("rollouts")
    seen = (
        f"All {paired:,} differences are exactly 0, {uncertain:,} of them at tokens with log μ below −0.01"
        f"{'; bypass is declared' if bypass else ''}."
    )
    severity: Severity = "look" if evidence.count("declared_policy") == evidence.count("rollouts") else "bad"
    return Finding(check, severity, seen, {"tokens": paired, "uncertain_tokens": uncertain})


def judge_ratio(evidence: LintEvidence) -> tuple[Outcome, Outcome]:
    """Processed log-probs, and a mean of ρ off 1 for any other reason."""
    processed, other = "processed_log_probs", "mean_ratio"
    paired = evidence.count("paired")
    if not paired:
        return NotChecked(processed, _NO_PAIRS), NotChecked(other, _NO_PAIRS)
    mean, t = evidence.groups.mean_and_t("ratio_minus_one")
    groups = int((evidence.groups.tokens > 0).sum())
    tested = groups >= LEAST_GROUPS and math.isfinite(mean) and not math.isnan(t)
    off = tested and abs(mean) >= _LEAST_RATIO_ERROR and abs(t) >= student_t_quantile(1 - FALSE_ALARM / 2, groups - 1)
    certain = evidence.count("certain_behaviour")
    above, below = evidence.count("above_zero"), evidence.count("below_zero")
    many_certain = certain >= _LEAST_CERTAIN and certain >= _CERTAIN_SHARE * paired
    one_sided = below >= _LEAST_CERTAIN and above <= _ONE_SIDED * below
    numbers = {"mean_ratio": 1.0 + mean, "t": t, "groups": groups, "certain_under_mu_only": certain}
    numbers |= {"d_above_0.01": above, "d_below_minus_0.01": below}
    told = f"Mean ρ is {number(1.0 + mean)}{_interval(mean, t, groups)}"
    few = NotChecked(other, f"the error of mean ρ needs {LEAST_GROUPS} prompt groups, and there are {groups}")
    if many_certain or (off and mean < 0 and (one_sided or evidence.count("processed_and_truncated"))):
        seen = (
            f"{told}; d is below −0.01 at {below:,} tokens and above 0.01 at {above:,}; {certain:,} tokens "
            f"({percent(certain, paired)}) are certain under μ and not under π."
        )
        return Finding(processed, "bad", seen, numbers), NotChecked(other, "explained by processed log-probs")
    if not tested:
        return NotChecked(processed, few.why), few
    if off:
        return Clean(processed), Finding(other, "look", f"{told}, Student's t {number(t)}.", numbers)
    return Clean(processed), Clean(other)


def judge_shift(evidence: LintEvidence) -> Outcome:
    """log π of a token fits log μ of its neighbour."""
    check = "shifted_log_probs"
    tokens, rollouts = evidence.count("shift_tokens"), evidence.count("shift_rollouts")
    if not evidence.count("paired"):
        return NotChecked(check, _NO_PAIRS)
    if tokens < _LEAST_SHIFT_TOKENS or rollouts < _LEAST_SHIFT_ROLLOUTS:
        return NotChecked(check, f"too few tokens have a neighbour on both sides: {tokens} in {rollouts} rollouts")
    own = evidence.sum("shift_none") / tokens
    gaps = {name: evidence.sum(f"shift_{name}") / tokens for name in ("earlier", "later")}
    best = min(gaps, key=lambda name: gaps[name])
    preferring = evidence.count(f"shift_prefer_{best}")
    if own < _LEAST_GAP or gaps[best] > _SHIFT_FACTOR * own or preferring < _SHIFT_SHARE * rollouts:
        return Clean(check)
    other = "t − 1" if best == "earlier" else "t + 1"
    seen = (
        f"log π of token t is {number(own)} off log μ of token t on average, and {number(gaps[best])} off log μ of "
        f"token {other}; the shift fits twice as well in {preferring:,} of {rollouts:,} rollouts."
    )
    numbers = {"mean_gap": own, "mean_gap_earlier": gaps["earlier"], "mean_gap_later": gaps["later"]}
    return Finding(check, "bad", seen, {**numbers, "rollouts_preferring": preferring, "rollouts": rollouts})


def _interval(mean: float, t: float, groups: int) -> str:
    """The 95 % interval of mean ρ, clustered by prompt group."""
    if groups < 2 or not math.isfinite(t) or t == 0.0:
        return ""
    reach = student_t_quantile(0.975, groups - 1) * abs(mean / t)
    low, high = number(1.0 + mean - reach), number(1.0 + mean + reach)
    return f" (95 % interval {low} to {high} over {groups:,} prompt groups)"
