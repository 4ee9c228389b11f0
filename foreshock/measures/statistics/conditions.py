"""Conditions that a mismatch may depend on, each with fixed buckets, so that the tables of any two batches merge.

Bucket i holds edges[i] ≤ value < edges[i + 1]; the last also takes all larger values, the first all smaller ones.
`BucketSums` are the sums over the tokens of a bucket, `BucketTable` their means.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from foreshock.json_values import finite_or_none

# Half decades of the probability under μ. The first bucket holds all below 1e-8; the last includes probability 1.
BUCKET_EDGES: tuple[float, ...] = (0.0, *(10.0 ** (-8 + half / 2) for half in range(16)), 1.0)

LOW_PROBABILITY = 0.1
"""Tokens whose probability under μ is below this are of low probability; one of BUCKET_EDGES."""

_LOG_EDGES = np.array([math.log(edge) for edge in BUCKET_EDGES[1:-1]])

# Powers of two of the position in the response, from 0: bucket i holds 2^i − 1 ≤ position < 2^(i+1) − 1.
POSITION_EDGES: tuple[float, ...] = tuple(float(2**power - 1) for power in range(22))


@dataclass(frozen=True, slots=True)
class Condition:
    """A condition: its name, the meaning and unit of its value, and the edges of its buckets, one more than buckets."""

    name: str
    meaning: str
    unit: str
    edges: tuple[float, ...]

    @property
    def size(self) -> int:
        """The number of buckets."""
        return len(self.edges) - 1

    def buckets(self, values: NDArray[np.floating] | NDArray[np.integer]) -> NDArray[np.int64]:
        """Return the bucket of each value, [T]; values must not be NaN."""
        inner = np.array(self.edges[1:-1])
        return np.searchsorted(inner, np.asarray(values, dtype=np.float64), side="right").astype(np.int64)


_ENTROPY_EDGES = (0.0, *(10.0 ** (-6 + half / 2) for half in range(15)), math.inf)
_LENGTH_EDGES = (*(float(2**power) for power in range(22)), math.inf)
_TURN_EDGES = (*(float(turn) for turn in range(16)), 16.0, 32.0, 64.0, 128.0, math.inf)
_LAG_EDGES = (-math.inf, *(float(lag) for lag in range(5)), 5.0, 9.0, 17.0, 33.0, 65.0, math.inf)

LAG_BUCKETS: dict[str, slice] = {
    **{str(lag): slice(lag + 1, lag + 2) for lag in range(5)},
    "5-8": slice(6, 7),
    "9-16": slice(7, 8),
    "17+": slice(8, None),
}
"""The lags for which k3 is a separate measure, with their buckets. Lags below 0 are an error of the logged versions."""

CONDITIONS: dict[str, Condition] = {
    condition.name: condition
    for condition in (
        Condition("probability", "the token's probability under μ", "1", BUCKET_EDGES),
        Condition("position", "the token's position in the response, counted from 0", "tokens", POSITION_EDGES),
        Condition("turn", "the turn that the token belongs to", "turns", _TURN_EDGES),
        Condition("length", "the number of model-generated tokens of the response", "tokens", _LENGTH_EDGES),
        Condition("entropy", "the entropy of μ at the token", "nats", _ENTROPY_EDGES),
        Condition("lag", "trainer weights version − the version that sampled", "versions", _LAG_EDGES),
    )
}


def probability_buckets(behaviour: NDArray[np.floating]) -> NDArray[np.int64]:
    """Return the bucket of each finite log μ, [T]: bucket i holds BUCKET_EDGES[i] ≤ μ < BUCKET_EDGES[i + 1]."""
    return np.searchsorted(_LOG_EDGES, np.asarray(behaviour, dtype=np.float64), side="right")


def position_buckets(positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the bucket of each position in the response, [T], counted from 0."""
    exponents: NDArray[np.int64] = ((positions + 1).astype(np.float64).view(np.int64) >> 52) - 1023
    return np.minimum(exponents, len(POSITION_EDGES) - 2)


Float64 = NDArray[np.float64]

BUCKET_SUMS = ("abs_d", "d", "k3_kl", "abs_probability_difference")


@dataclass(frozen=True, slots=True, eq=False)
class BucketSums:
    """Mergeable sums per bucket: `tokens` [B], `sums` [B, 4] of BUCKET_SUMS, `max_abs_d` [B] (0 if empty), in nats."""

    tokens: NDArray[np.int64]
    sums: Float64
    max_abs_d: Float64

    @classmethod
    def empty(cls, edges: tuple[float, ...]) -> BucketSums:
        """Return empty buckets between these edges."""
        size = len(edges) - 1
        return cls(np.zeros(size, np.int64), np.zeros((size, len(BUCKET_SUMS))), np.zeros(size))

    @classmethod
    def of(
        cls,
        size: int,
        buckets: NDArray[np.int64],
        values: Sequence[Float64],
        distance: Float64,
        tokens: NDArray[np.int64] | None = None,
    ) -> BucketSums:
        """Return the sums over T tokens: their `buckets` [T], the [T] values of each of BUCKET_SUMS, and |d| [T].

        With `tokens` [T] each entry is a run of that many tokens, with its sums and its largest |d|.
        """
        largest = np.zeros(size)
        np.maximum.at(largest, buckets, distance)
        counts = np.bincount(buckets, tokens, size).astype(np.int64)
        sums = np.zeros((size, len(BUCKET_SUMS)))
        for place, each in enumerate(values):
            sums[:, place] = np.bincount(buckets, each, size)
        return cls(counts, sums, largest)

    def merge(self, other: BucketSums) -> BucketSums:
        """Return the sums over the tokens of both."""
        return BucketSums(
            self.tokens + other.tokens, self.sums + other.sums, np.maximum(self.max_abs_d, other.max_abs_d)
        )

    def mean_of(self, name: str, buckets: slice) -> tuple[int, float]:
        """Return the number of tokens in some buckets, and their mean of one of BUCKET_SUMS; NaN if none."""
        tokens = int(self.tokens[buckets].sum())
        total = math.fsum(self.sums[buckets, BUCKET_SUMS.index(name)].tolist())
        return tokens, total / tokens if tokens else math.nan

    def table(self, edges: tuple[float, ...]) -> BucketTable:
        """Return the means per bucket; NaN for an empty bucket."""
        tokens = self.tokens.astype(np.float64)
        with np.errstate(invalid="ignore", divide="ignore"):
            means = self.sums / tokens[:, None]
        largest = np.where(self.tokens > 0, self.max_abs_d, math.nan)
        return BucketTable(np.array(edges), self.tokens, means[:, 0], means[:, 1], means[:, 2], largest, means[:, 3])


@dataclass(frozen=True, slots=True, eq=False)
class BucketTable:
    """Means per bucket, [B], in nats; bucket i lies between `edges[i]` and `edges[i + 1]`, [B + 1].

    NaN for an empty bucket.

    `mean_d` is the mean of log π − log μ, `k3_kl` that of k3, `mean_abs_probability_difference` that of |π − μ|.
    `tokens` / Σ tokens · `k3_kl` is the bucket's contribution to k3 over all tokens.
    """

    edges: Float64
    tokens: NDArray[np.int64]
    mean_abs_d: Float64
    mean_d: Float64
    k3_kl: Float64
    max_abs_d: Float64
    mean_abs_probability_difference: Float64

    def columns(self) -> dict[str, list[float | int | None]]:
        """Return the columns by name as JSON values: None for NaN."""
        columns: dict[str, list[float | int | None]] = {"tokens": self.tokens.tolist()}
        for name in ("mean_abs_d", "mean_d", "k3_kl", "max_abs_d", "mean_abs_probability_difference"):
            values: list[float] = getattr(self, name).tolist()
            columns[name] = [finite_or_none(value) for value in values]
        return columns
