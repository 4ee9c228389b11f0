"""Fold the statistics of a step's shards into measurements. Knows no database: decoder processes import it.

Shards are folded in the order of their numbers, so that the result does not depend on the order of arrival.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Protocol

from foreshock.comparisons import STEP_ROW
from foreshock.measures.comparison import Comparison
from foreshock.measures.comparison_statistics import ComparisonStatistics
from foreshock.measures.rollout_summaries import RolloutSummaries
from foreshock.measures.step_statistics import StepStatistics


@dataclass(frozen=True, slots=True)
class FoldedStatistics:
    """One comparison of a whole step: its measures by column, and the statistics and summaries they came from."""

    comparison: str
    measures: Mapping[str, float]
    statistics_version: int
    statistics: bytes
    summaries: bytes | None


class Part(Protocol):
    """What a shard adds to one comparison: a row of the database, or what a decoder has just measured."""

    @property
    def statistics(self) -> bytes:
        """Mergeable statistics."""

    @property
    def summaries(self) -> bytes | None:
        """A row a rollout; None where it is no comparison of two scores."""


def fold_shards(comparison: str, shards: Sequence[Part]) -> FoldedStatistics:
    """The fold of one comparison's shards, which are given in sorted order; StatisticsError where versions mix."""
    if comparison == STEP_ROW:
        step = reduce(StepStatistics.merge, (StepStatistics.from_bytes(shard.statistics) for shard in shards))
        return FoldedStatistics(comparison, step.measures(), step.statistics_version, step.to_bytes(), None)
    pair = reduce(ComparisonStatistics.merge, (ComparisonStatistics.from_bytes(shard.statistics) for shard in shards))
    summaries = RolloutSummaries.concat(
        [RolloutSummaries.from_bytes(shard.summaries) for shard in shards if shard.summaries is not None]
    )
    return FoldedStatistics(
        comparison,
        Comparison(pair, summaries).measures(),
        pair.statistics_version,
        pair.to_bytes(),
        summaries.to_bytes(),
    )
