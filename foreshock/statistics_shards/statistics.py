"""The mergeable statistics of one shard in their stored form, the same for tokens and for statistics that travel."""

from __future__ import annotations

from dataclasses import dataclass

from foreshock.comparisons import STEP_ROW
from foreshock.measures.comparison import StepMeasurement

__all__ = ["ShardPart", "statistics_of_shard"]


@dataclass(frozen=True, slots=True)
class ShardPart:
    """A shard's contribution to one comparison of its step: mergeable statistics and, for pairs, rollout summaries."""

    comparison: str
    statistics_version: int
    statistics: bytes
    summaries: bytes | None


def statistics_of_shard(measurement: StepMeasurement) -> tuple[ShardPart, ...]:
    """Return the statistics of the rollouts (STEP_ROW) and of each comparison, by its name."""
    own = ShardPart(STEP_ROW, measurement.step.statistics_version, measurement.step.to_bytes(), None)
    pairs = [
        ShardPart(name, pair.statistics.statistics_version, pair.statistics.to_bytes(), pair.summaries.to_bytes())
        for name, pair in sorted(measurement.comparisons.items())
    ]
    return own, *pairs
