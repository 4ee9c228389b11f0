"""The severities of alerts and lint warnings, and their order."""

from typing import Final, Literal

Severity = Literal["info", "warning", "critical"]

SEVERITIES: Final[tuple[Severity, ...]] = ("critical", "warning", "info")
"""Most severe first. The alphabet orders them differently ("info" before "warning"), so compare by `severity_rank`."""


def severity_rank(severity: str) -> int:
    """Return the place in `SEVERITIES`: 0 for "critical". A severity that a newer service sends ranks last."""
    return SEVERITIES.index(severity) if severity in SEVERITIES else len(SEVERITIES)
