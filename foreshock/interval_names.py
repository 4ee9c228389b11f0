"""What intervals are called: a 95 % interval only where it was measured to cover, else a resampling range.

The rule is in `foreshock.measures.estimators.reliability`; sentences, pages, the report and the API use these words.
"""

from __future__ import annotations

__all__ = ["CALLED_INTERVAL", "INTERVAL", "RANGE", "RANGE_DESCRIPTION", "RANGE_NOTE", "interval_name"]

INTERVAL, RANGE = "95 % interval", "resampling range"
RANGE_NOTE = (
    f"A {RANGE} covers the true value less often than 95 %: there are few or uneven prompts, or a few tokens carry the "
    "sum. It is no bound."
)
RANGE_DESCRIPTION = f"what low to high is: `{INTERVAL}`, or `{RANGE}`. {RANGE_NOTE}"
"""Description of a field `interval` beside `low` and `high`."""
CALLED_INTERVAL = ("k3_kl", "tv_token")
"""Measures of a step whose bootstrap-t is a 95 % interval if it is reliable: χ² covers 86 % in one case, and the
coverage of others was not measured."""


def interval_name(reliable: bool | None) -> str:
    """Return what an interval is called; None: whether it is reliable is not known."""
    return INTERVAL if reliable else RANGE
