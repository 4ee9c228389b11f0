"""Measure a batch: one comparison of two scores, or everything that a trainer logged for a step; merge the results."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol, Self, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from foreshock.comparisons import TRAINER_ROLLOUT
from foreshock.errors import StatisticsError
from foreshock.measures.comparison_statistics import ComparisonStatistics
from foreshock.measures.inputs import lag_of_tokens, token_inputs
from foreshock.measures.passes import sum_rollouts
from foreshock.measures.rollout_summaries import RolloutSummaries
from foreshock.measures.step_statistics import StepStatistics
from foreshock.rollouts.arrays import as_array
from foreshock.rollouts.batch import RolloutBatch
from foreshock.rollouts.schema import are_log_probs


@dataclass(frozen=True, slots=True)
class Comparison:
    """The result of one comparison `target/behaviour`: mergeable statistics, and one row per rollout."""

    statistics: ComparisonStatistics
    summaries: RolloutSummaries

    def measures(self) -> dict[str, float]:
        """Return all comparison and sequence measures of the registry by column; NaN if not estimable."""
        return self.statistics.measures() | self.summaries.bootstrap_measures()

    def merge(self, other: Comparison) -> Comparison:
        """Return the comparison over the rollouts of both, such as those of two data-parallel ranks."""
        summaries = RolloutSummaries.concat([self.summaries, other.summaries])
        return Comparison(self.statistics.merge(other.statistics), summaries)


@dataclass(frozen=True, slots=True)
class StepMeasurement:
    """Statistics of the rollouts, and of each logged comparison by its name `target/behaviour`."""

    step: StepStatistics
    comparisons: dict[str, Comparison]

    def merge(self, other: StepMeasurement) -> StepMeasurement:
        """Return the measurement over the rollouts of both. Raises StatisticsError if their comparisons differ."""
        if self.comparisons.keys() != other.comparisons.keys():
            raise StatisticsError(
                f"all parts must have the same comparisons, got {sorted(self.comparisons)} and "
                f"{sorted(other.comparisons)}: log the same columns on every rank"
            )
        comparisons = {name: own.merge(other.comparisons[name]) for name, own in self.comparisons.items()}
        return StepMeasurement(self.step.merge(other.step), comparisons)


def compare(batch: RolloutBatch, target: ArrayLike, behaviour: ArrayLike) -> Comparison:
    """Compare log π `target` with log μ `behaviour`, each [T] over the batch's response tokens.

    Only model-generated tokens with two log-probs are measured; others are counted (see `are_log_probs`). The batch's
    entropies are those of the logged μ, so they are used only if `behaviour` equals `batch.rollout_log_probs`, and not
    for the surprisals if they are declared as those of π. Raises InvalidRolloutsError if a size does not fit.
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
        _without_placeholders(as_array(target, "target")),
        _without_placeholders(behaviour),
        batch.response_offsets,
        batch.response_mask,
        entropy=batch.entropy if is_logged else None,
        turn=batch.turn,
        lag=lag,
        token_ids=batch.response_token_ids,
        advantage=_advantage(batch),
    )
    sums = sum_rollouts(inputs)
    if batch.attributes.entropy_policy == "trainer":
        sums.column("surprisal")[:] = 0.0
    statistics = ComparisonStatistics.from_rollout_sums(sums, batch.group_ids)
    return Comparison(statistics, RolloutSummaries.of(batch, sums, lag))


def _without_placeholders(values: NDArray[Any]) -> NDArray[Any]:
    """Replace values that cannot be log-probs, such as -9999, by NaN."""
    if values.dtype.kind != "f":
        return values
    # Most batches have none; the extremes show this without an array of flags, and are NaN if a value is NaN.
    if bool(are_log_probs(np.array([values.min(initial=0.0), values.max(initial=0.0)])).all()):
        return values
    return np.where(are_log_probs(values), values, np.asarray(np.nan, values.dtype))


def _advantage(batch: RolloutBatch) -> NDArray[np.float32] | None:
    """Return the batch's advantages, [T] or [N]; always [T] if T equals N, because the sizes are ambiguous then."""
    advantage = batch.advantage
    if advantage is None or batch.advantage_per_token or batch.num_rollouts != batch.num_tokens:
        return advantage
    return np.repeat(advantage, batch.response_lengths)


def measure_step(batch: RolloutBatch) -> StepMeasurement:
    """Measure a batch as logged: its rollouts, and `trainer/rollout` if both log-probs were logged."""
    comparisons = {}
    if batch.trainer_log_probs is not None and batch.rollout_log_probs is not None:
        comparisons[TRAINER_ROLLOUT] = compare(batch, batch.trainer_log_probs, batch.rollout_log_probs)
    return StepMeasurement(StepStatistics.of(batch), comparisons)


class Mergeable(Protocol):
    """Anything with a `merge`: ComparisonStatistics, StepStatistics, Comparison, StepMeasurement."""

    def merge(self, other: Self, /) -> Self:
        """Return the value over the rollouts of both."""


Part = TypeVar("Part", bound=Mergeable)


def fold(parts: Iterable[Part]) -> Part:
    """Merge parts, such as shards or data-parallel ranks, in the order given.

    Give them in the order of shards or ranks: the same order gives the same bits, another one agrees to the rounding of
    sums, about 1e-15 of the sum of absolute values.

    Raises StatisticsError if `parts` is empty.
    """
    merged: Part | None = None
    for part in parts:
        merged = part if merged is None else merged.merge(part)
    if merged is None:
        raise StatisticsError("fold needs at least one part, got none")
    return merged
