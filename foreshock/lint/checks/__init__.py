"""The checks of the lint: each takes merged evidence and returns a Finding, Clean, or NotChecked with the reason."""

from __future__ import annotations

from foreshock.lint.checks.outcomes import Clean, Finding, NotChecked, Outcome
from foreshock.lint.checks.run import run_checks
from foreshock.lint.checks.surprisal import SurprisalSums, check_surprisal, sums_for_run

__all__ = [
    "Clean",
    "Finding",
    "NotChecked",
    "Outcome",
    "SurprisalSums",
    "check_surprisal",
    "run_checks",
    "sums_for_run",
]
