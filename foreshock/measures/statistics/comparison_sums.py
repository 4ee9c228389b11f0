"""Sums over the tokens and rollouts of a comparison: accessors, merging, and their form as a blob.

`comparison_statistics.py` fills them; `estimators/comparison_measures.py` computes the measures.
"""

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from foreshock.errors import StatisticsError
from foreshock.measures.statistics import blob
from foreshock.measures.statistics.clusters import CLUSTER_COLUMNS, ClusterSums
from foreshock.measures.statistics.compensated_sums import CompensatedSums, LogWeights
from foreshock.measures.statistics.conditions import BUCKET_SUMS, CONDITIONS, BucketSums, BucketTable
from foreshock.measures.statistics.histograms import LOG_RATIO_GRID, WEIGHT_GRID
from foreshock.measures.statistics.rollout_sums import SEQUENCE_SUMS, TOKEN_SUMS
from foreshock.measures.statistics.tails import LARGEST_VALUES, TAIL_LEVELS, TAIL_SUMS, level_index, merge_largest
from foreshock.measures.statistics.token_ids import KEPT_TOKEN_IDS, TOKEN_ID_SUMS, TokenIdSums, TokenIdTable

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


@dataclass(frozen=True, slots=True, eq=False)
class ComparisonSums:
    """Sums of d = log target − log behaviour (π/μ) over model-generated tokens with two finite log-probs.

    `counts`, `sums` and `extremes` are in the order of COUNTS, SUMS and EXTREMES. `RolloutSums` describes the other
    arrays.
    """

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

    def token_id_table(self, limit: int = KEPT_TOKEN_IDS) -> TokenIdTable:
        """Return the mismatch by token id: the `limit` ids with the largest Σ k3."""
        return self.token_ids.table(limit)

    def tail_count(self, side: int, level: float) -> int:
        """Return the number of tokens with d < −level (BELOW) or d > level (ABOVE), `level` one of TAIL_LEVELS."""
        return int(self.tail_counts[side, level_index(level)])

    def tail_sum(self, side: int, level: float, name: str) -> float:
        """Return one of TAIL_SUMS over the tokens of `tail_count`."""
        return self.tail_sums.at((side, level_index(level), TAIL_SUMS.index(name)))

    def tail(self, threshold: float) -> float:
        """Return the fraction of tokens with max(ρ, 1/ρ) > `threshold` (any > 1), to the width of a histogram bin."""
        if not self.tokens:
            return math.nan
        counts = self.histogram.sum(axis=0)
        first = int(LOG_RATIO_GRID.bins(np.array([math.log(threshold)]))[0]) + 1
        return float(counts[first:].sum()) / self.tokens

    def merge(self, other: Self) -> Self:
        """Return the sums over the rollouts of both."""
        return type(self)(
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

    def to_bytes(self) -> bytes:
        """Return the sums as a blob for `from_bytes`, with the 512 token ids of the largest Σ k3."""
        weights = (self.token_weights, self.turn_weights, self.sequence_weights)
        token_ids = self.token_ids.kept()
        arrays: dict[str, NDArray[Any]] = {
            **{name: getattr(self, name) for name in _STORED_ARRAYS},
            **{name: getattr(self, name).to_array() for name in _STORED_SUMS},
            "weights": np.stack([of_one.to_array() for of_one in weights]),
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
    def from_bytes(cls, data: bytes) -> Self:
        """Restore the sums from `to_bytes()`. Raises StatisticsError if damaged or of another version."""
        arrays = blob.unpack(_KIND, data, _LAYOUT)
        _check(arrays)
        sums = {name: CompensatedSums.from_array(values) for name, values in arrays.items() if name.endswith("sums")}
        token_weights, turn_weights, sequence_weights = (
            LogWeights.from_array(int(arrays["counts"][_COUNT_PLACES[name]]), row)
            for name, row in zip(_WEIGHTED, arrays["weights"], strict=True)
        )
        stored: dict[str, Any] = {name: arrays[name] for name in _STORED_ARRAYS}
        return cls(
            **stored,
            sums=sums["sums"],
            token_weights=token_weights,
            turn_weights=turn_weights,
            sequence_weights=sequence_weights,
            tail_sums=sums["tail_sums"],
            weight_sums=sums["weight_sums"],
            conditions={
                name: BucketSums(arrays[f"{name}_tokens"], sums[f"{name}_sums"], arrays[f"{name}_max"])
                for name in CONDITIONS
            },
            token_ids=TokenIdSums(
                arrays["token_ids"],
                arrays["token_id_tokens"],
                sums["token_id_sums"],
                arrays["token_id_covered"],
                float(arrays["token_id_bound"][0]),
            ),
            clusters=ClusterSums(
                arrays["group_keys"],
                arrays["group_tokens"],
                sums["group_sums"],
                int(arrays["single_count"][0]),
                sums["single_sums"],
            ),
        )

    def __reduce__(self) -> tuple[Any, ...]:
        # Processes exchange the stored form: sums over a whole vocabulary are about a hundred times as large.
        return type(self).from_bytes, (self.to_bytes(),)


_KIND = "comparison"
# The entry of COUNTS that holds the number of weights, for each of the three weights.
_WEIGHTED = ("tokens", "turns", "measured_rollouts")
# The fields that are stored unchanged, and those that are compensated sums.
_STORED_ARRAYS = ("counts", "extremes", "histogram", "tail_counts", "largest_d", "largest_minus_d")
_STORED_SUMS = ("sums", "tail_sums", "weight_sums")


def _layout() -> dict[str, tuple[str, tuple[int | None, ...]]]:
    layout: dict[str, tuple[str, tuple[int | None, ...]]] = {
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
    for name, condition in CONDITIONS.items():
        layout[f"{name}_tokens"] = ("<i8", (condition.size,))
        layout[f"{name}_sums"] = ("<f8", (2, condition.size, len(BUCKET_SUMS)))
        layout[f"{name}_max"] = ("<f8", (condition.size,))
    return layout


_LAYOUT = _layout()


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
