"""Measure a batch: one comparison of two scores, or all that a trainer has logged of a step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol, Self, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from foreshock.comparisons import TRAINER_ROLLOUT
from foreshock.errors import StatisticsError
from foreshock.measures.comparison_statistics import ComparisonStatistics
from foreshock.measures.inputs import token_inputs
from foreshock.measures.passes import sum_rollouts
from foreshock.measures.rollout_summaries import RolloutSummaries
from foreshock.measures.statistics.derived_columns import lag_of_tokens
from foreshock.measures.step_statistics import StepStatistics
from foreshock.rollouts.arrays import as_array
from foreshock.rollouts.batch import RolloutBatch

__all__ = ["Comparison", "Mergeable", "StepMeasurement", "compare", "fold", "measure_step"]


@dataclass(frozen=True, slots=True)
class Comparison:
    """What one comparison `target/behaviour` gives: statistics that merge, and a row per rollout."""

    statistics: ComparisonStatistics
    summaries: RolloutSummaries

    def measures(self) -> dict[str, float]:
        """Every comparison and sequence measure of the registry by column; NaN where it is not estimable."""
        return self.statistics.measures() | self.summaries.bootstrap_measures()

    def merge(self, other: Comparison) -> Comparison:
        """The same comparison over the rollouts of both, such as those of two data-parallel ranks."""
        summaries = RolloutSummaries.concat([self.summaries, other.summaries])
        return Comparison(self.statistics.merge(other.statistics), summaries)


@dataclass(frozen=True, slots=True)
class StepMeasurement:
    """Statistics of the rollouts, and of each logged comparison by its name `target/behaviour`."""

    step: StepStatistics
    comparisons: dict[str, Comparison]

    def merge(self, other: StepMeasurement) -> StepMeasurement:
        """The same over the rollouts of both. Raises StatisticsError where they do not have the same comparisons."""
        if self.comparisons.keys() != other.comparisons.keys():
            raise StatisticsError(
                f"one part has the comparisons {sorted(self.comparisons)} and another {sorted(other.comparisons)}: "
                "log the same columns in all"
            )
        comparisons = {name: own.merge(other.comparisons[name]) for name, own in self.comparisons.items()}
        return StepMeasurement(self.step.merge(other.step), comparisons)


def compare(batch: RolloutBatch, target: ArrayLike, behaviour: ArrayLike) -> Comparison:
    """Compare log π `target` with log μ `behaviour`, each [T] over the batch's response tokens.

    Measured are model-generated tokens with two finite log-probs. The batch's entropies are those of the logged μ, so
    they are used only where `behaviour` is the batch's own `rollout_log_probs`. Raises InvalidRolloutsError where a
    size does not fit.
    """
    behaviour = as_array(behaviour, "behaviour")
    logged = batch.rollout_log_probs
    is_logged = (
        batch.entropy is not None
        and logged is not None
        and (behaviour is logged or np.array_equal(behaviour, logged, equal_nan=True))
    )
    lag = lag_of_tokens(batch)
    inputs = token_inputs(
        target,
        behaviour,
        batch.response_offsets,
        batch.response_mask,
        entropy=batch.entropy if is_logged else None,
        turn=batch.turn,
        lag=lag,
        token_ids=batch.response_token_ids,
        advantage=_advantage(batch),
    )
    sums = sum_rollouts(inputs)
    statistics = ComparisonStatistics.from_rollout_sums(sums, batch.group_ids)
    return Comparison(statistics, RolloutSummaries.of(batch, sums, lag))


def _advantage(batch: RolloutBatch) -> NDArray[np.float32] | None:
    """The batch's advantages, [T] or [N]; [T] wherever the two cannot be told apart by their size."""
    advantage = batch.advantage
    if advantage is None or batch.advantage_per_token or batch.num_rollouts != batch.num_tokens:
        return advantage
    return np.repeat(advantage, batch.response_lengths)


def measure_step(batch: RolloutBatch) -> StepMeasurement:
    """Measure a batch as it was logged: its rollouts, and `trainer/rollout` where both log-probs are there."""
    comparisons = {}
    if batch.trainer_log_probs is not None and batch.rollout_log_probs is not None:
        comparisons[TRAINER_ROLLOUT] = compare(batch, batch.trainer_log_probs, batch.rollout_log_probs)
    return StepMeasurement(StepStatistics.of(batch), comparisons)


class Mergeable(Protocol):
    """What has a `merge`: ComparisonStatistics, StepStatistics, Comparison, StepMeasurement."""

    def merge(self, other: Self, /) -> Self:
        """The same over the rollouts of both."""


Part = TypeVar("Part", bound=Mergeable)


def fold(parts: Iterable[Part]) -> Part:
    """All parts as one, merged in the order given; sums do not depend on it to 1e-12 and better.

    Raises StatisticsError where there is no part.
    """
    merged: Part | None = None
    for part in parts:
        merged = part if merged is None else merged.merge(part)
    if merged is None:
        raise StatisticsError("there is nothing to fold: give at least one part")
    return merged
