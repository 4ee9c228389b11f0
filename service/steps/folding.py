"""Fold the statistics of a step's shards: always in sorted order, so that the result does not know who came first."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

from foreshock.measures.statistics import ComparisonStatistics, StepStatistics
from foreshock.measures.summaries import RolloutSummaries
from service.database.tables import ShardStatistics
from service.decoding.shards import STEP_ROW
from service.measurements.folded import FoldedStatistics


def fold_shards(comparison: str, shards: Sequence[ShardStatistics]) -> FoldedStatistics:
    """The fold of one comparison's shards, which are given in sorted order; StatisticsError where versions mix."""
    if comparison == STEP_ROW:
        step = reduce(StepStatistics.merge, (StepStatistics.from_bytes(shard.statistics) for shard in shards))
        return FoldedStatistics(comparison, step.measures(), step.statistics_version, step.to_bytes(), None)
    pair = reduce(ComparisonStatistics.merge, (ComparisonStatistics.from_bytes(shard.statistics) for shard in shards))
    summaries = RolloutSummaries.concat(
        [RolloutSummaries.from_bytes(shard.summaries) for shard in shards if shard.summaries is not None]
    )
    return FoldedStatistics(comparison, pair.measures(), pair.statistics_version, pair.to_bytes(), summaries.to_bytes())
