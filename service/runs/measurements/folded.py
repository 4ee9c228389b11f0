"""What is stored of one comparison of one step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FoldedStatistics:
    """One comparison of a whole step: its measures by column, and the statistics and summaries they came from."""

    comparison: str
    measures: Mapping[str, float]
    statistics_version: int
    statistics: bytes
    summaries: bytes | None
