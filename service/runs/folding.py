"""Fold the statistics of a step's shards into measurements. Independent of the database: decoder processes import it.

Shards are folded in the order of their numbers, so that the result does not depend on the order of arrival.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Protocol

import numpy as np

from foreshock.comparisons import STEP_ROW, TRAINER_ROLLOUT
from foreshock.measures import comparison_statistics, rollout_summaries
from foreshock.measures.comparison import Comparison
from foreshock.measures.statistics.blob import STATISTICS_VERSION
from foreshock.measures.step_statistics import StepStatistics


@dataclass(frozen=True, slots=True)
class FoldedStatistics:
    """One comparison of a whole step: its measures by column, and the statistics and summaries behind them.

    `from_sample`: only some of the step's rollouts are included.
    """

    comparison: str
    measures: Mapping[str, float]
    statistics_version: int
    statistics: bytes
    summaries: bytes | None
    from_sample: bool = False
    buckets: bytes | None = None
    """Tokens, then mean k3, float64, of each bucket of probability; of TRAINER_ROLLOUT only."""


class Part(Protocol):
    """Contribution of a shard to one comparison: a database row, or the result of a decoder."""

    @property
    def comparison(self) -> str:
        """`target/behaviour`, or STEP_ROW for measures that belong to no comparison."""

    @property
    def statistics_version(self) -> int:
        """Version of both blobs."""

    @property
    def statistics(self) -> bytes:
        """Mergeable statistics."""

    @property
    def summaries(self) -> bytes | None:
        """Rollout summaries, a row per rollout; None if this is not a comparison of two scores."""


def fold_step(parts: Iterable[Part]) -> tuple[FoldedStatistics, ...]:
    """Return the measurements of a step from the parts of its shards, which are in the order of the shards.

    Parts of another version do not merge with this release's. They are left out, and the comparison counts as a sample.
    """
    by_comparison: defaultdict[str, list[Part]] = defaultdict(list)
    for part in parts:
        by_comparison[part.comparison].append(part)
    folded = []
    for comparison, group in sorted(by_comparison.items()):
        current = [part for part in group if part.statistics_version == STATISTICS_VERSION]
        if current:
            folded.append(replace(_fold(comparison, current), from_sample=len(current) < len(group)))
    return tuple(folded)


def _fold(comparison: str, parts: Sequence[Part]) -> FoldedStatistics:
    if comparison == STEP_ROW:
        step = reduce(StepStatistics.merge, (StepStatistics.from_bytes(part.statistics) for part in parts))
        return FoldedStatistics(comparison, step.measures(), step.statistics_version, step.to_bytes(), None)
    statistics = reduce(
        comparison_statistics.ComparisonStatistics.merge,
        (comparison_statistics.ComparisonStatistics.from_bytes(part.statistics) for part in parts),
    )
    summaries = rollout_summaries.RolloutSummaries.concat(
        [rollout_summaries.RolloutSummaries.from_bytes(part.summaries) for part in parts if part.summaries is not None]
    )
    return FoldedStatistics(
        comparison,
        Comparison(statistics, summaries).measures(),
        statistics.statistics_version,
        statistics.to_bytes(),
        summaries.to_bytes(),
        buckets=bucket_bytes(comparison, statistics),
    )


def bucket_bytes(comparison: str, statistics: comparison_statistics.ComparisonStatistics) -> bytes | None:
    """Return `FoldedStatistics.buckets` of a comparison."""
    if comparison != TRAINER_ROLLOUT:
        return None
    table = statistics.buckets()
    return np.stack([table.tokens.astype(np.float64), table.k3_kl]).tobytes()
