"""Records of findings. Times are UTC microseconds; NaN means "not estimable"."""

from __future__ import annotations

from dataclasses import dataclass

from foreshock.interval_names import RANGE

__all__ = ["ConfidenceRecord", "FindingRecord"]


@dataclass(frozen=True, slots=True)
class ConfidenceRecord:
    """How sure a named cause is: its link's share E[d_link·d]/E[d²] of the mismatch, with its interval."""

    share: float
    low: float
    high: float
    interval: str = RANGE


@dataclass(frozen=True, slots=True)
class FindingRecord:
    """What is concluded from a run's stored data: a cause ("attribution"), or a warning of the "lint".

    `severity` is that of the worst step; `sentence` and `confidence` are of the newest of its `steps`. `remedy` is None
    if none is known, `confidence` if the source has none.
    """

    run: str
    run_key: str
    project: str
    source: str
    name: str
    title: str
    severity: str
    sentence: str
    remedy: str | None
    steps: int
    first_step: int
    newest_step: int
    confidence: ConfidenceRecord | None = None
    changed_at_us: int | None = None
