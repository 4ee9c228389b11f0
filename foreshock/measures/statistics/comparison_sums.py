"""Sums over the tokens and rollouts of a comparison: accessors, merging, and their form as a blob.

`comparison_statistics.py` fills them; `estimators/comparison_measures.py` computes the measures.
"""

import math
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from foreshock.errors import StatisticsError
from foreshock.measures.statistics import blob
from foreshock.measures.statistics.clusters import CLUSTER_COLUMNS, ClusterSums
from foreshock.measures.statistics.conditions import BUCKET_SUMS, CONDITIONS, BucketSums, BucketTable
from foreshock.measures.statistics.histograms import LOG_RATIO_GRID
from foreshock.measures.statistics.log_weights import LogWeights
from foreshock.measures.statistics.moments import Moments
from foreshock.measures.statistics.rollout_sums import SEQUENCE_SUMS, TOKEN_SUMS
from foreshock.measures.statistics.tails import LARGEST_VALUES, REGIONS, TAIL_SUMS, merge_largest, region_beyond
from foreshock.measures.statistics.token_ids import KEPT_TOKEN_IDS, TOKEN_ID_SUMS, TokenIdSums, TokenIdTable

COUNTS = (
    "rollouts",
    "whole_rollouts",
    "incomplete_rollouts",
    "generated_tokens",
    "tokens",
    "nonfinite_target",
    "nonfinite_behaviour",
    "zero_tokens",
    "entropy_tokens",
    "advantage_tokens",
    "bad_updates",
    "turns",  # of whole rollouts
)
SUMS = TOKEN_SUMS + SEQUENCE_SUMS
# The largest −d, d and |π − μ| of a token, and the largest mean of −d and of d over a whole sequence. All merge by
# maximum; −inf means that there is no value yet.
EXTREMES = ("minus_min_d", "max_d", "max_probability_difference", "max_log_ppl_diff", "minus_min_log_ppl_diff")

Float64 = NDArray[np.float64]

_COUNT_PLACES = {name: place for place, name in enumerate(COUNTS)}
_SUM_PLACES = {name: place for place, name in enumerate(SUMS)}


@dataclass(frozen=True, slots=True, eq=False)
class ComparisonSums:
    """Sums of d = log target − log behaviour (π/μ) over model-generated tokens with two finite log-probs.

    They are plain float64 sums: a step is the fold of its shards in sorted order, which gives the same bits whatever
    the order of arrival. `counts`, `sums` and `extremes` are in the order of COUNTS, SUMS and EXTREMES;
    `probabilities` are the moments of π and μ, `difference` those of |π − μ|. `RolloutSums` describes the other arrays.
    """

    counts: NDArray[np.int64]
    sums: Float64
    extremes: NDArray[np.float64]
    token_weights: LogWeights
    turn_weights: LogWeights
    sequence_weights: LogWeights
    histogram: NDArray[np.int64]
    region_tokens: NDArray[np.int64]
    region_sums: Float64
    probabilities: Moments
    difference: Moments
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
        return float(self.sums[_SUM_PLACES[name]])

    @property
    def tokens(self) -> int:
        """The number of model-generated tokens with two finite log-probs, the denominator of every token mean."""
        return self.count("tokens")

    @property
    def rollouts(self) -> int:
        """The number of rollouts, including those without a measured token."""
        return self.count("rollouts")

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
        return int(self.region_tokens[side, region_beyond(level) :].sum())

    def tail_sum(self, side: int, level: float, name: str) -> float:
        """Return one of TAIL_SUMS over the tokens of `tail_count`."""
        return float(self.region_sums[side, region_beyond(level) :, TAIL_SUMS.index(name)].sum())

    def merge(self, other: Self) -> Self:
        """Return the sums over the rollouts of both."""
        # Infinite sums are kept; +inf and −inf together are NaN.
        with np.errstate(over="ignore", invalid="ignore"):
            return self._merged(other)

    def _merged(self, other: Self) -> Self:
        return type(self)(
            **{name: getattr(self, name) + getattr(other, name) for name in _ADDED},
            **{name: getattr(self, name).merge(getattr(other, name)) for name in _MERGED},
            extremes=np.maximum(self.extremes, other.extremes),
            conditions={name: table.merge(other.conditions[name]) for name, table in self.conditions.items()},
            largest_d=merge_largest(self.largest_d, other.largest_d, LARGEST_VALUES),
            largest_minus_d=merge_largest(self.largest_minus_d, other.largest_minus_d, LARGEST_VALUES),
        )

    def to_bytes(self) -> bytes:
        """Return the sums as a blob for `from_bytes`, with the 512 token ids of the largest Σ k3."""
        token_ids = self.token_ids.kept()
        arrays: dict[str, NDArray[Any]] = {
            **{name: getattr(self, name) for name in _STORED_ARRAYS},
            **{name: getattr(self, name).to_array() for name in _COUNTED},
            "token_ids": token_ids.ids,
            "token_id_tokens": token_ids.tokens,
            "token_id_sums": token_ids.sums,
            "token_id_covered": token_ids.covered,
            "token_id_bound": np.array([token_ids.bound]),
            "group_keys": self.clusters.keys,
            "group_tokens": self.clusters.tokens,
            "group_sums": self.clusters.sums,
            "single_count": np.array([self.clusters.single_count], dtype=np.int64),
            "single_sums": self.clusters.single_sums,
        }
        for name, buckets in self.conditions.items():
            arrays[f"{name}_tokens"] = buckets.tokens
            arrays[f"{name}_sums"] = buckets.sums
            arrays[f"{name}_max"] = buckets.max_abs_d
        return blob.pack(_KIND, arrays)

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Restore the sums from `to_bytes()`. Raises StatisticsError if damaged or of another version."""
        arrays = blob.unpack(_KIND, data, _LAYOUT)
        _check(arrays)
        counted = {
            name: (int(arrays["counts"][_COUNT_PLACES[count]]), arrays[name]) for name, count in _COUNTED.items()
        }
        return cls(
            **{name: arrays[name] for name in _STORED_ARRAYS},
            token_weights=LogWeights.from_array(*counted["token_weights"]),
            turn_weights=LogWeights.from_array(*counted["turn_weights"]),
            sequence_weights=LogWeights.from_array(*counted["sequence_weights"]),
            probabilities=Moments.from_array(*counted["probabilities"], size=2),
            difference=Moments.from_array(*counted["difference"], size=1),
            conditions={
                name: BucketSums(arrays[f"{name}_tokens"], arrays[f"{name}_sums"], arrays[f"{name}_max"])
                for name in CONDITIONS
            },
            token_ids=TokenIdSums(
                arrays["token_ids"],
                arrays["token_id_tokens"],
                arrays["token_id_sums"],
                arrays["token_id_covered"],
                float(arrays["token_id_bound"][0]),
            ),
            clusters=ClusterSums(
                arrays["group_keys"],
                arrays["group_tokens"],
                arrays["group_sums"],
                int(arrays["single_count"][0]),
                arrays["single_sums"],
            ),
        )

    def __reduce__(self) -> tuple[Any, ...]:
        # Processes exchange the stored form: sums over a whole vocabulary are about a hundred times as large.
        return type(self).from_bytes, (self.to_bytes(),)


_KIND = "comparison"
# The fields that are added, those that merge themselves, and those that are stored unchanged.
_ADDED = ("counts", "sums", "histogram", "region_tokens", "region_sums")
_STORED_ARRAYS = (*_ADDED, "extremes", "largest_d", "largest_minus_d")
# Fields whose number of values is stored as one of COUNTS.
_COUNTED = {
    "token_weights": "tokens",
    "turn_weights": "turns",
    "sequence_weights": "whole_rollouts",
    "probabilities": "tokens",
    "difference": "tokens",
}
_MERGED = (*_COUNTED, "token_ids", "clusters")


def _layout() -> dict[str, tuple[str, tuple[int | None, ...]]]:
    layout: dict[str, tuple[str, tuple[int | None, ...]]] = {
        "counts": ("<i8", (len(COUNTS),)),
        "sums": ("<f8", (len(SUMS),)),
        "extremes": ("<f8", (len(EXTREMES),)),
        **dict.fromkeys(("token_weights", "turn_weights", "sequence_weights"), ("<f8", (3,))),
        "probabilities": ("<f8", (6,)),
        "difference": ("<f8", (2,)),
        "histogram": ("<i8", (2, LOG_RATIO_GRID.size)),
        "region_tokens": ("<i8", (2, REGIONS)),
        "region_sums": ("<f8", (2, REGIONS, len(TAIL_SUMS))),
        "largest_d": ("<f8", (None,)),
        "largest_minus_d": ("<f8", (None,)),
        "token_ids": ("<i8", (None,)),
        "token_id_tokens": ("<i8", (None,)),
        "token_id_sums": ("<f8", (None, len(TOKEN_ID_SUMS))),
        "token_id_covered": ("<f8", (None,)),
        "token_id_bound": ("<f8", (1,)),
        "group_keys": ("<u8", (None,)),
        "group_tokens": ("<i8", (None,)),
        "group_sums": ("<f8", (None, len(CLUSTER_COLUMNS))),
        "single_count": ("<i8", (1,)),
        "single_sums": ("<f8", (1 + 2 * len(CLUSTER_COLUMNS),)),
    }
    for name, condition in CONDITIONS.items():
        layout[f"{name}_tokens"] = ("<i8", (condition.size,))
        layout[f"{name}_sums"] = ("<f8", (condition.size, len(BUCKET_SUMS)))
        layout[f"{name}_max"] = ("<f8", (condition.size,))
    return layout


_LAYOUT = _layout()


def _check(arrays: dict[str, Any]) -> None:
    """Raise StatisticsError if lengths that belong together differ."""
    of_groups = {arrays["group_keys"].size, arrays["group_tokens"].size, arrays["group_sums"].shape[0]}
    names = ("token_ids", "token_id_tokens", "token_id_covered")
    of_token_ids = {arrays["token_id_sums"].shape[0], *(arrays[name].size for name in names)}
    largest = max(arrays["largest_d"].size, arrays["largest_minus_d"].size)
    if (
        len(of_groups) > 1
        or len(of_token_ids) > 1
        or largest > LARGEST_VALUES
        or (np.diff(arrays["token_ids"]) <= 0).any()
        or (arrays["counts"] < 0).any()
    ):
        raise StatisticsError("the blob is damaged: its counts contradict each other")
