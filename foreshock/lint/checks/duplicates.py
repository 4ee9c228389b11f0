"""Check for rollouts that are logged more than once in a step."""

from __future__ import annotations

import math

import numpy as np

from foreshock.lint.checks.outcomes import FALSE_ALARM, Clean, Finding, NotChecked, Outcome
from foreshock.lint.evidence.lint_evidence import LintEvidence
from foreshock.lint.formatting import format_number

__all__ = ["check_duplicates"]

# Repeats are counted among all responses, and among those whose log μ is at most this, in nats.
_LEVELS = (0.0, -1.0, -2.0, -4.0, -6.0, -8.0, -12.0, -16.0, -32.0, -64.0)


def check_duplicates(evidence: LintEvidence, *, distribution_known: bool = True) -> Outcome:
    """Check for more equal rollouts than chance explains.

    `distribution_known` is False if log μ may not be the sampling distribution: then the chance is not known.
    """
    check = "duplicated_rollouts"
    hashes = evidence.rollout_hashes
    if not hashes.prompts.size:
        within_step = "checked within a step, not across steps"
        return NotChecked(check, within_step if evidence.count("rollout_logged") else "needs rollout_log_probs")
    if evidence.count("unknown_repeat_chance") or not distribution_known:
        why = "log μ may not be the sampling distribution: the chance of equal responses is not known"
        return NotChecked(check, why)
    if hashes.are_distinct():
        return Clean(check)
    log_chance, level, repeated, expected = min(
        (_log_chance(*repeats), level, *repeats)
        for level, repeats in zip(_LEVELS, hashes.repeats(*_LEVELS), strict=True)
    )
    if log_chance > math.log(FALSE_ALARM / len(_LEVELS)):
        return Clean(check)
    # A batch logged twice and sampling at temperature 0 look the same.
    one = np.unique(hashes.contents).size == np.unique(hashes.prompts).size < hashes.prompts.size
    greedy = "; no prompt has two different responses: if sampling was greedy, declare temperature 0" if one else ""
    counted = f", counting responses with a probability of at most {format_number(math.exp(level))}" if level else ""
    seen = (
        f"{repeated:,} of {hashes.prompts.size:,} rollouts equal another one of their prompt in every token and in "
        f"every bit of log μ{counted}; {format_number(expected)} are expected by chance{greedy}."
    )
    return Finding(
        check, "warning", seen, {"repeated": repeated, "expected": expected, "rollouts": hashes.prompts.size}
    )


def _log_chance(repeated: int, expected: float) -> float:
    """Return Chernoff's bound of the log of the chance of this many repeats.

    It is the bound of a Poisson tail, which holds for a sum of events whose chances depend on the past (Freedman 1975).
    """
    expected = max(expected, 1e-300)
    return repeated - expected - repeated * math.log(repeated / expected) if repeated > expected else 0.0
