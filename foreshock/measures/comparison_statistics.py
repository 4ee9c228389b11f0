"""The mergeable statistics of one comparison, from which all its measures and tables are computed.

A step's statistics are the fold of its shards' in sorted order. Integers are exact and sums are compensated, so any
split and order of the rollouts gives the same numbers (to 1e-12 and better).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from foreshock.errors import StatisticsError
from foreshock.measures.estimators.comparison_measures import comparison_measures
from foreshock.measures.estimators.intervals import Interval, token_mean_interval
from foreshock.measures.inputs import token_inputs
from foreshock.measures.passes import sum_rollouts
from foreshock.measures.statistics import blob
from foreshock.measures.statistics.clusters import CLUSTER_COLUMNS, ClusterSums
from foreshock.measures.statistics.compensated_sums import CompensatedSums, LogWeights
from foreshock.measures.statistics.conditions import BUCKET_SUMS, CONDITIONS, BucketSums, BucketTable
from foreshock.measures.statistics.histograms import LOG_RATIO_GRID, WEIGHT_GRID
from foreshock.measures.statistics.rollout_sums import SEQUENCE_SUMS, TOKEN_SUMS, RolloutSums, sequence_sums
from foreshock.measures.statistics.tails import LARGEST_VALUES, TAIL_LEVELS, TAIL_SUMS, level_index, merge_largest
from foreshock.measures.statistics.token_ids import KEPT_TOKEN_IDS, TOKEN_ID_SUMS, TokenIdSums, TokenIdTable

_CLUSTER_PLACES = np.array([TOKEN_SUMS.index(name) for name in CLUSTER_COLUMNS])


COUNTS = (
    "rollouts",
    "measured_rollouts",
    "incomplete_rollouts",
    "generated_tokens",
    "tokens",
    "nonfinite_target",
    "nonfinite_behaviour",
    "zero_tokens",
    "entropy_tokens",
    "advantage_tokens",
    "bad_updates",
    "turns",
)
SUMS = TOKEN_SUMS + SEQUENCE_SUMS
# The largest −d, d and |π − μ| of a token, and the largest mean of −d and of d over a sequence. All merge by maximum;
# −inf means that there is no value yet.
EXTREMES = ("minus_min_d", "max_d", "max_probability_difference", "max_log_ppl_diff", "minus_min_log_ppl_diff")

_COUNT_PLACES = {name: place for place, name in enumerate(COUNTS)}
_SUM_PLACES = {name: place for place, name in enumerate(SUMS)}


_KIND = "comparison"
# The entry of COUNTS that holds the number of weights, for each of the three weights.
_WEIGHTED = ("tokens", "turns", "measured_rollouts")


_LAYOUT: dict[str, tuple[str, tuple[int | None, ...]]] = {
    "counts": ("<i8", (len(COUNTS),)),
    "sums": ("<f8", (2, len(SUMS))),
    "extremes": ("<f8", (len(EXTREMES),)),
    "weights": ("<f8", (len(_WEIGHTED), 3)),
    "histogram": ("<i8", (2, LOG_RATIO_GRID.size)),
    "tail_counts": ("<i8", (2, len(TAIL_LEVELS))),
    "tail_sums": ("<f8", (2, 2, len(TAIL_LEVELS), len(TAIL_SUMS))),
    "weight_sums": ("<f8", (2, 2, WEIGHT_GRID.size, len(TAIL_SUMS))),
    "largest_d": ("<f8", (None,)),
    "largest_minus_d": ("<f8", (None,)),
    "token_ids": ("<i8", (None,)),
    "token_id_tokens": ("<i8", (None,)),
    "token_id_sums": ("<f8", (2, None, len(TOKEN_ID_SUMS))),
    "token_id_covered": ("<f8", (None,)),
    "token_id_bound": ("<f8", (1,)),
    "group_keys": ("<u8", (None,)),
    "group_tokens": ("<i8", (None,)),
    "group_sums": ("<f8", (2, None, len(CLUSTER_COLUMNS))),
    "single_count": ("<i8", (1,)),
    "single_sums": ("<f8", (2, 1 + 2 * len(CLUSTER_COLUMNS))),
}
for _name, _condition in CONDITIONS.items():
    _LAYOUT[f"{_name}_tokens"] = ("<i8", (_condition.size,))
    _LAYOUT[f"{_name}_sums"] = ("<f8", (2, _condition.size, len(BUCKET_SUMS)))
    _LAYOUT[f"{_name}_max"] = ("<f8", (_condition.size,))


@dataclass(frozen=True, slots=True, eq=False)
class ComparisonStatistics:
    """Statistics of d = log target − log behaviour (π/μ) over the model-generated tokens of some rollouts.

    Tokens with a NaN or ±inf log-prob on either side are counted and otherwise excluded; a sequence contributes to the
    sequence measures with its remaining tokens. Build them with `of`.

    `counts`, `sums` and `extremes` are in the order of COUNTS, SUMS and EXTREMES. `RolloutSums` describes the other
    arrays.
    """

    statistics_version: ClassVar[int] = blob.STATISTICS_VERSION

    counts: NDArray[np.int64]
    sums: CompensatedSums
    extremes: NDArray[np.float64]
    token_weights: LogWeights
    turn_weights: LogWeights
    sequence_weights: LogWeights
    histogram: NDArray[np.int64]
    tail_counts: NDArray[np.int64]
    tail_sums: CompensatedSums
    weight_sums: CompensatedSums
    conditions: dict[str, BucketSums]
    token_ids: TokenIdSums
    largest_d: NDArray[np.float64]
    largest_minus_d: NDArray[np.float64]
    clusters: ClusterSums

    @classmethod
    def of(
        cls,
        target: ArrayLike,
        behaviour: ArrayLike,
        offsets: ArrayLike,
        mask: ArrayLike | None = None,
        group_ids: Iterable[object] | None = None,
        *,
        entropy: ArrayLike | None = None,
        turn: ArrayLike | None = None,
        lag: ArrayLike | None = None,
        token_ids: ArrayLike | None = None,
        advantage: ArrayLike | None = None,
    ) -> ComparisonStatistics:
        """Return the statistics of log π `target` and log μ `behaviour`, both [T], of N rollouts cut at `offsets` [N +
        1].

        `mask` [T] is 0 for tokens that the model did not sample; `group_ids` [N] name the prompts by strings or
        integers (None: a cluster by itself); `entropy` [T] is that of μ in nats; `turn` [T] numbers the turns; `lag`
        [T] is in weights versions; `advantage` is [T] or [N]. Raises InvalidRolloutsError if sizes or types do not fit.
        """
        inputs = token_inputs(
            target, behaviour, offsets, mask,
            entropy=entropy, turn=turn, lag=lag, token_ids=token_ids, advantage=advantage,
        )  # fmt: skip
        return cls.from_rollout_sums(sum_rollouts(inputs), group_ids)

    @classmethod
    def from_rollout_sums(cls, rollouts: RolloutSums, group_ids: Iterable[object] | None) -> ComparisonStatistics:
        """Return the statistics of rollouts from the sums of a pass; `group_ids` [N] name their prompts."""
        of_sequences, errors, log_weights = sequence_sums(rollouts)
        measured = rollouts.tokens > 0
        values = np.concatenate([rollouts.sums[measured], of_sequences], axis=1)
        low = np.zeros_like(values)
        low[:, -errors.shape[1] :] = errors
        cluster_values = rollouts.sums[:, _CLUSTER_PLACES]
        return cls(
            counts=_counts(rollouts),
            sums=CompensatedSums.over_first_axis(values, low),
            extremes=_extremes(rollouts, log_weights),
            token_weights=rollouts.token_weights,
            turn_weights=rollouts.turn_weights,
            sequence_weights=LogWeights.of(log_weights),
            histogram=rollouts.histogram,
            tail_counts=rollouts.tail_counts,
            tail_sums=CompensatedSums(rollouts.tail_sums, np.zeros_like(rollouts.tail_sums)),
            weight_sums=CompensatedSums(rollouts.weight_sums, np.zeros_like(rollouts.weight_sums)),
            conditions=rollouts.conditions,
            token_ids=rollouts.token_ids,
            largest_d=rollouts.largest_d,
            largest_minus_d=rollouts.largest_minus_d,
            clusters=ClusterSums.of(rollouts.tokens, cluster_values, group_ids),
        )

    def merge(self, other: ComparisonStatistics) -> ComparisonStatistics:
        """Return the statistics over the rollouts of both."""
        return ComparisonStatistics(
            counts=self.counts + other.counts,
            sums=self.sums + other.sums,
            extremes=np.maximum(self.extremes, other.extremes),
            token_weights=self.token_weights.merge(other.token_weights),
            turn_weights=self.turn_weights.merge(other.turn_weights),
            sequence_weights=self.sequence_weights.merge(other.sequence_weights),
            histogram=self.histogram + other.histogram,
            tail_counts=self.tail_counts + other.tail_counts,
            tail_sums=self.tail_sums + other.tail_sums,
            weight_sums=self.weight_sums + other.weight_sums,
            conditions={name: table.merge(other.conditions[name]) for name, table in self.conditions.items()},
            token_ids=self.token_ids.merge(other.token_ids),
            largest_d=merge_largest(self.largest_d, other.largest_d, LARGEST_VALUES),
            largest_minus_d=merge_largest(self.largest_minus_d, other.largest_minus_d, LARGEST_VALUES),
            clusters=self.clusters.merge(other.clusters),
        )

    def count(self, name: str) -> int:
        """Return one of COUNTS."""
        return int(self.counts[_COUNT_PLACES[name]])

    def extreme(self, name: str) -> float:
        """Return one of EXTREMES; NaN without tokens."""
        return float(self.extremes[EXTREMES.index(name)]) if self.tokens else math.nan

    def sum(self, name: str) -> float:
        """Return one of SUMS as float64."""
        return self.sums.at(_SUM_PLACES[name])

    @property
    def tokens(self) -> int:
        """The number of model-generated tokens with two finite log-probs, the denominator of every token mean."""
        return self.count("tokens")

    @property
    def rollouts(self) -> int:
        """The number of rollouts, including those without a measured token."""
        return self.count("rollouts")

    @property
    def nonfinite_target(self) -> int:
        """The number of model-generated tokens whose target log-prob is NaN, ±inf or a placeholder."""
        return self.count("nonfinite_target")

    @property
    def nonfinite_behaviour(self) -> int:
        """The number of model-generated tokens whose behaviour log-prob is NaN, ±inf or a placeholder."""
        return self.count("nonfinite_behaviour")

    def exact_sum(self, name: str) -> Fraction:
        """Return one of SUMS with all the digits that were kept."""
        return self.sums.exact(_SUM_PLACES[name])

    def exact_ratio(self, name: str) -> tuple[int, int]:
        """Return `exact_sum` as its numerator and its denominator, not reduced."""
        return self.sums.exact_ratio(_SUM_PLACES[name])

    def condition_table(self, name: str) -> BucketTable:
        """Return the mismatch by one of CONDITIONS; the means of an empty bucket are NaN."""
        return self.conditions[name].table(CONDITIONS[name].edges)

    def buckets(self) -> BucketTable:
        """Return the mismatch by the token's probability under μ."""
        return self.condition_table("probability")

    def position_buckets(self) -> BucketTable:
        """Return the mismatch by the token's position in the response."""
        return self.condition_table("position")

    def token_id_table(self, limit: int = KEPT_TOKEN_IDS) -> TokenIdTable:
        """Return the mismatch by token id: the `limit` ids with the largest Σ k3."""
        return self.token_ids.table(limit)

    def tail_count(self, side: int, level: float) -> int:
        """Return the number of tokens with d < −level (BELOW) or d > level (ABOVE), `level` one of TAIL_LEVELS."""
        return int(self.tail_counts[side, level_index(level)])

    def tail_sum(self, side: int, level: float, name: str) -> float:
        """Return one of TAIL_SUMS over those tokens."""
        return self.tail_sums.at((side, level_index(level), TAIL_SUMS.index(name)))

    def tail(self, threshold: float) -> float:
        """Return the fraction of tokens with max(ρ, 1/ρ) > `threshold` (any > 1), to the width of a histogram bin."""
        if not self.tokens:
            return math.nan
        counts = self.histogram.sum(axis=0)
        first = int(LOG_RATIO_GRID.bins(np.array([math.log(threshold)]))[0]) + 1
        return float(counts[first:].sum()) / self.tokens

    def measures(self) -> dict[str, float]:
        """Return all comparison and sequence measures of the registry by column; NaN if not estimable.

        Measures that need one row per rollout (`RolloutSummaries.bootstrap_measures`) are NaN here.
        """
        return comparison_measures(self)

    def interval(self, name: str) -> Interval:
        """Return the nominal 95 % interval of a token mean, clustered by prompt group (by rollout if it has none).

        `name` is `kl` or one of CLUSTER_COLUMNS: `k3_kl`, `chi2_token`, `reverse_chi2_token`, `tv_token`, ….
        """
        return token_mean_interval(self, name)

    def to_bytes(self) -> bytes:
        """Return the statistics as a blob for `from_bytes`, with the 512 token ids of the largest Σ k3."""
        weights = (self.token_weights, self.turn_weights, self.sequence_weights)
        token_ids = self.token_ids.kept()
        arrays: dict[str, NDArray[Any]] = {
            "counts": self.counts,
            "sums": self.sums.to_array(),
            "extremes": self.extremes,
            "weights": np.stack([of_one.to_array() for of_one in weights]),
            "histogram": self.histogram,
            "tail_counts": self.tail_counts,
            "tail_sums": self.tail_sums.to_array(),
            "weight_sums": self.weight_sums.to_array(),
            "largest_d": self.largest_d,
            "largest_minus_d": self.largest_minus_d,
            "token_ids": token_ids.ids,
            "token_id_tokens": token_ids.tokens,
            "token_id_sums": token_ids.sums.to_array(),
            "token_id_covered": token_ids.covered,
            "token_id_bound": np.array([token_ids.bound]),
            "group_keys": self.clusters.keys,
            "group_tokens": self.clusters.tokens,
            "group_sums": self.clusters.sums.to_array(),
            "single_count": np.array([self.clusters.single_count], dtype=np.int64),
            "single_sums": self.clusters.single_sums.to_array(),
        }
        for name, buckets in self.conditions.items():
            arrays[f"{name}_tokens"] = buckets.tokens
            arrays[f"{name}_sums"] = buckets.sums.to_array()
            arrays[f"{name}_max"] = buckets.max_abs_d
        return blob.pack(_KIND, arrays)

    @classmethod
    def from_bytes(cls, data: bytes) -> ComparisonStatistics:
        """Return the statistics of `to_bytes()`. Raises StatisticsError if damaged or of another version."""
        arrays = blob.unpack(_KIND, data, _LAYOUT)
        counts = arrays["counts"]
        _check(arrays)
        token_weights, turn_weights, sequence_weights = (
            LogWeights.from_array(int(counts[COUNTS.index(name)]), row)
            for name, row in zip(_WEIGHTED, arrays["weights"], strict=True)
        )
        return cls(
            counts=counts,
            sums=CompensatedSums.from_array(arrays["sums"]),
            extremes=arrays["extremes"],
            token_weights=token_weights,
            turn_weights=turn_weights,
            sequence_weights=sequence_weights,
            histogram=arrays["histogram"],
            tail_counts=arrays["tail_counts"],
            tail_sums=CompensatedSums.from_array(arrays["tail_sums"]),
            weight_sums=CompensatedSums.from_array(arrays["weight_sums"]),
            conditions={
                name: BucketSums(
                    arrays[f"{name}_tokens"], CompensatedSums.from_array(arrays[f"{name}_sums"]), arrays[f"{name}_max"]
                )
                for name in CONDITIONS
            },
            token_ids=TokenIdSums(
                arrays["token_ids"],
                arrays["token_id_tokens"],
                CompensatedSums.from_array(arrays["token_id_sums"]),
                arrays["token_id_covered"],
                float(arrays["token_id_bound"][0]),
            ),
            largest_d=arrays["largest_d"],
            largest_minus_d=arrays["largest_minus_d"],
            clusters=ClusterSums(
                arrays["group_keys"],
                arrays["group_tokens"],
                CompensatedSums.from_array(arrays["group_sums"]),
                int(arrays["single_count"][0]),
                CompensatedSums.from_array(arrays["single_sums"]),
            ),
        )

    def __reduce__(self) -> tuple[Any, ...]:
        # Processes exchange the stored form: exact sums of a whole vocabulary are about a hundred times as large.
        return type(self).from_bytes, (self.to_bytes(),)


def _check(arrays: dict[str, Any]) -> None:
    """Raise StatisticsError if lengths that belong together differ."""
    of_groups = {arrays["group_keys"].size, arrays["group_tokens"].size, arrays["group_sums"].shape[1]}
    names = ("token_ids", "token_id_tokens", "token_id_covered")
    of_token_ids = {arrays["token_id_sums"].shape[1], *(arrays[name].size for name in names)}
    largest = max(arrays["largest_d"].size, arrays["largest_minus_d"].size)
    if (
        len(of_groups) > 1
        or len(of_token_ids) > 1
        or largest > LARGEST_VALUES
        or (np.diff(arrays["token_ids"]) <= 0).any()
        or (arrays["counts"] < 0).any()
    ):
        raise StatisticsError("the blob is damaged: its counts contradict each other")


def _counts(rollouts: RolloutSums) -> NDArray[np.int64]:
    counts = {
        "rollouts": rollouts.tokens.size,
        "measured_rollouts": int((rollouts.tokens > 0).sum()),
        "incomplete_rollouts": int((rollouts.tokens < rollouts.generated).sum()),
        "generated_tokens": int(rollouts.generated.sum()),
        "tokens": int(rollouts.tokens.sum()),
        "nonfinite_target": rollouts.nonfinite_target,
        "nonfinite_behaviour": rollouts.nonfinite_behaviour,
        "zero_tokens": rollouts.zero_tokens,
        "entropy_tokens": int(rollouts.entropy_tokens.sum()),
        "advantage_tokens": int(rollouts.advantage_tokens.sum()),
        "bad_updates": rollouts.bad_updates,
        "turns": int(rollouts.turns.sum()),
    }
    return np.array([counts[name] for name in COUNTS], dtype=np.int64)


def _extremes(rollouts: RolloutSums, log_weights: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return EXTREMES from the rollouts' sums and Σ d of the measured rollouts."""
    measured = rollouts.tokens > 0
    if not log_weights.size:
        return np.array([-math.inf, -math.inf, rollouts.max_probability_difference, -math.inf, -math.inf])
    mean_d = log_weights / rollouts.tokens[measured]
    lowest, highest = rollouts.min_d[measured].min(), rollouts.max_d[measured].max()
    return np.array([-lowest, highest, rollouts.max_probability_difference, -mean_d.min(), mean_d.max()])
