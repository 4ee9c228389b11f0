"""The mergeable statistics of one comparison: everything that its measures and buckets are made of.

A shard has its own; a step's are the fold of its shards' in sorted order. Integers are exact; sums are compensated, so
that any way to split and order the rollouts gives the same numbers (to 1e-12 and better).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from foreshock.errors import InvalidRolloutsError, StatisticsError
from foreshock.measures import blob
from foreshock.measures.buckets import BUCKET_EDGES, BUCKET_SUMS, POSITION_EDGES, BucketSums
from foreshock.measures.clusters import CLUSTER_COLUMNS, ClusterSums
from foreshock.measures.comparison_measures import comparison_measures
from foreshock.measures.comparison_sums import COUNTS, EXTREMES, SUMS, ComparisonSums
from foreshock.measures.histograms import LOG_RATIO_GRID
from foreshock.measures.log_weights import LogWeights
from foreshock.measures.per_rollout import TAIL_THRESHOLDS, RolloutSums, TokenInputs, sum_rollouts
from foreshock.measures.sequences import sequence_sums
from foreshock.measures.step_statistics import StepStatistics
from foreshock.measures.sums import CompensatedSums

__all__ = ["ComparisonStatistics", "StepStatistics", "fold"]

_KIND = "comparison"
_BUCKETS = len(BUCKET_EDGES) - 1
_POSITIONS = len(POSITION_EDGES) - 1
_LAYOUT: dict[str, tuple[str, tuple[int | None, ...]]] = {
    "counts": ("<i8", (len(COUNTS),)),
    "sums": ("<f8", (2, len(SUMS))),
    "extremes": ("<f8", (len(EXTREMES),)),
    "weights": ("<f8", (3, 3)),
    "histogram": ("<i8", (2, LOG_RATIO_GRID.size)),
    "probability_tokens": ("<i8", (_BUCKETS,)),
    "probability_sums": ("<f8", (2, _BUCKETS, len(BUCKET_SUMS))),
    "probability_max": ("<f8", (_BUCKETS,)),
    "position_tokens": ("<i8", (_POSITIONS,)),
    "position_sums": ("<f8", (2, _POSITIONS, len(BUCKET_SUMS))),
    "position_max": ("<f8", (_POSITIONS,)),
    "group_keys": ("<u8", (None,)),
    "group_tokens": ("<i8", (None,)),
    "group_sums": ("<f8", (2, None, len(CLUSTER_COLUMNS))),
    "single_count": ("<i8", (1,)),
    "single_sums": ("<f8", (2, 1 + 2 * len(CLUSTER_COLUMNS))),
}


@dataclass(frozen=True, slots=True, eq=False)
class ComparisonStatistics(ComparisonSums):
    """Statistics of d = log target − log behaviour (π/μ) over the model-generated tokens of some rollouts.

    Tokens where either log-prob is NaN or ±inf are counted and take part in nothing else; a sequence takes part in the
    measures of sequences with the tokens that are left. Build them with `of`.
    """

    statistics_version: ClassVar[int] = blob.STATISTICS_VERSION

    @classmethod
    def of(
        cls,
        target: ArrayLike,
        behaviour: ArrayLike,
        offsets: ArrayLike,
        mask: ArrayLike | None = None,
        group_ids: Sequence[str | None] | None = None,
        *,
        entropy: ArrayLike | None = None,
        turn: ArrayLike | None = None,
    ) -> ComparisonStatistics:
        """The statistics of log π `target` and log μ `behaviour`, both [T], of N rollouts cut at `offsets` [N + 1].

        `mask` [T] is 0 where the model did not sample; `group_ids` [N] name the prompts; `entropy` [T] is that of μ in
        nats; `turn` [T] numbers the turns. Raises InvalidRolloutsError where the sizes do not fit.
        """
        inputs = token_inputs(target, behaviour, offsets, mask, entropy=entropy, turn=turn)
        return cls.of_rollout_sums(sum_rollouts(inputs), group_ids)

    @classmethod
    def of_rollout_sums(cls, rollouts: RolloutSums, group_ids: Sequence[str | None] | None) -> ComparisonStatistics:
        """The statistics of rollouts whose own sums are known; `group_ids` [N] name their prompts."""
        of_sequences, errors, log_weights = sequence_sums(rollouts)
        measured = rollouts.tokens > 0
        values = np.concatenate([rollouts.sums[measured], of_sequences], axis=1)
        low = np.concatenate([np.zeros_like(rollouts.sums[measured]), errors], axis=1)
        cluster_values = np.stack([rollouts.column(name) for name in CLUSTER_COLUMNS], axis=1)
        counts = {
            "rollouts": rollouts.tokens.size,
            "measured_rollouts": int(measured.sum()),
            "incomplete_rollouts": int((rollouts.tokens < rollouts.generated).sum()),
            "generated_tokens": int(rollouts.generated.sum()),
            "tokens": int(rollouts.tokens.sum()),
            "nonfinite_target": rollouts.nonfinite_target,
            "nonfinite_behaviour": rollouts.nonfinite_behaviour,
            "zero_tokens": rollouts.zero_tokens,
            "below_threshold": rollouts.below_threshold,
            "entropy_tokens": int(rollouts.entropy_tokens.sum()),
            "turns": int(rollouts.turns.sum()),
            **{f"tail_{name}": int(count) for name, count in zip(TAIL_THRESHOLDS, rollouts.tails, strict=True)},
        }
        return cls(
            counts=np.array([counts[name] for name in COUNTS], dtype=np.int64),
            sums=CompensatedSums.over_first_axis(values, low),
            extremes=np.array(
                [
                    np.max(-rollouts.min_d[measured], initial=-math.inf),
                    np.max(rollouts.max_d[measured], initial=-math.inf),
                    rollouts.max_probability_difference,
                ]
            ),
            token_weights=rollouts.token_weights,
            turn_weights=rollouts.turn_weights,
            sequence_weights=LogWeights.of(log_weights),
            histogram=rollouts.histogram,
            probabilities=rollouts.probabilities,
            positions=rollouts.positions,
            clusters=ClusterSums.of(rollouts.tokens, cluster_values, group_ids),
        )

    def merge(self, other: ComparisonStatistics) -> ComparisonStatistics:
        """The statistics over the rollouts of both."""
        return ComparisonStatistics(
            self.counts + other.counts,
            self.sums + other.sums,
            np.maximum(self.extremes, other.extremes),
            self.token_weights.merge(other.token_weights),
            self.turn_weights.merge(other.turn_weights),
            self.sequence_weights.merge(other.sequence_weights),
            self.histogram + other.histogram,
            self.probabilities.merge(other.probabilities),
            self.positions.merge(other.positions),
            self.clusters.merge(other.clusters),
        )

    def measures(self) -> dict[str, float]:
        """Every comparison and sequence measure of the registry by column name; NaN where it is not estimable."""
        return comparison_measures(self)

    def to_bytes(self) -> bytes:
        """The statistics as a blob that `from_bytes` reads: a JSON header and raw arrays."""
        arrays: dict[str, NDArray[Any]] = {
            "counts": self.counts,
            "sums": _pair(self.sums),
            "extremes": self.extremes,
            "weights": np.stack(
                [weights.to_array() for weights in (self.token_weights, self.turn_weights, self.sequence_weights)]
            ),
            "histogram": self.histogram,
            "group_keys": self.clusters.keys,
            "group_tokens": self.clusters.tokens,
            "group_sums": _pair(self.clusters.sums),
            "single_count": np.array([self.clusters.single_count], dtype=np.int64),
            "single_sums": _pair(self.clusters.single_sums),
        }
        for name, buckets in (("probability", self.probabilities), ("position", self.positions)):
            arrays[f"{name}_tokens"] = buckets.tokens
            arrays[f"{name}_sums"] = _pair(buckets.sums)
            arrays[f"{name}_max"] = buckets.max_abs_d
        return blob.pack(_KIND, arrays)

    @classmethod
    def from_bytes(cls, data: bytes) -> ComparisonStatistics:
        """The statistics of `to_bytes()`. Raises StatisticsError where they are damaged or of another version."""
        arrays = blob.unpack(_KIND, data, _LAYOUT)
        counts, weights = arrays["counts"], arrays["weights"]
        groups = arrays["group_keys"].size
        if arrays["group_tokens"].size != groups or arrays["group_sums"].shape[1] != groups or (counts < 0).any():
            raise StatisticsError("this blob is damaged: its counts do not fit together")
        of_weights = ("tokens", "turns", "measured_rollouts")
        token, turn, sequence = (
            LogWeights.from_array(int(counts[COUNTS.index(name)]), row)
            for name, row in zip(of_weights, weights, strict=True)
        )
        probabilities, positions = (
            BucketSums(arrays[f"{name}_tokens"], _unpair(arrays[f"{name}_sums"]), arrays[f"{name}_max"])
            for name in ("probability", "position")
        )
        clusters = ClusterSums(
            arrays["group_keys"],
            arrays["group_tokens"],
            _unpair(arrays["group_sums"]),
            int(arrays["single_count"][0]),
            _unpair(arrays["single_sums"]),
        )
        return cls(
            counts,
            _unpair(arrays["sums"]),
            arrays["extremes"],
            token,
            turn,
            sequence,
            arrays["histogram"],
            probabilities,
            positions,
            clusters,
        )


def fold(parts: Iterable[ComparisonStatistics]) -> ComparisonStatistics:
    """The statistics over all parts, merged in the order given (a step's: its shards in sorted order).

    Raises StatisticsError where there is no part.
    """
    try:
        return functools.reduce(ComparisonStatistics.merge, parts)
    except TypeError:
        raise StatisticsError("there are no statistics to fold") from None


def token_inputs(
    target: ArrayLike,
    behaviour: ArrayLike,
    offsets: ArrayLike,
    mask: ArrayLike | None = None,
    *,
    entropy: ArrayLike | None = None,
    turn: ArrayLike | None = None,
) -> TokenInputs:
    """The inputs of a comparison as arrays whose sizes fit; raises InvalidRolloutsError where they do not."""
    cuts = np.asarray(offsets, dtype=np.int64)
    arrays = {"target": np.asarray(target), "behaviour": np.asarray(behaviour)}
    optional = {"response_mask": mask, "entropy": entropy, "turn": turn}
    arrays |= {name: np.asarray(value) for name, value in optional.items() if value is not None}
    if cuts.ndim != 1 or cuts.size == 0 or cuts[0] != 0 or (np.diff(cuts) < 0).any():
        raise InvalidRolloutsError("offsets must rise from 0 and have N + 1 entries")
    for name, array in arrays.items():
        if array.shape != (int(cuts[-1]),):
            raise InvalidRolloutsError(
                f"has the shape {array.shape} and must have one value for each of the {int(cuts[-1])} tokens",
                column=name,
            )
    generated = arrays["response_mask"] != 0 if "response_mask" in arrays else None
    return TokenInputs(
        arrays["target"], arrays["behaviour"], cuts, generated, arrays.get("entropy"), arrays.get("turn")
    )


def _pair(sums: CompensatedSums) -> NDArray[np.float64]:
    return np.stack([sums.high, sums.low])


def _unpair(values: NDArray[np.float64]) -> CompensatedSums:
    return CompensatedSums(values[0], values[1])
