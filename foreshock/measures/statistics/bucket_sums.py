"""Sums over the tokens of a bucket, such as a range of probabilities under μ, and the table of their means."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from foreshock.json_values import finite_or_none
from foreshock.measures.statistics.compensated_sums import CompensatedSums, Parts, sums_by_bucket

Float64 = NDArray[np.float64]

BUCKET_SUMS = ("abs_d", "d", "k3_kl", "abs_probability_difference")


@dataclass(frozen=True, slots=True, eq=False)
class BucketSums:
    """Mergeable sums per bucket: `tokens` [B], `sums` [B, 4] of BUCKET_SUMS, `max_abs_d` [B] (0 if empty), in nats."""

    tokens: NDArray[np.int64]
    sums: CompensatedSums
    max_abs_d: Float64

    @classmethod
    def empty(cls, edges: tuple[float, ...]) -> BucketSums:
        """Return empty buckets between these edges."""
        size = len(edges) - 1
        return cls(np.zeros(size, np.int64), CompensatedSums.zeros(size, len(BUCKET_SUMS)), np.zeros(size))

    @classmethod
    def of(
        cls,
        size: int,
        buckets: NDArray[np.int64],
        parts: Sequence[Parts],
        distance: Float64,
        tokens: NDArray[np.int64] | None = None,
    ) -> BucketSums:
        """Return the sums over T tokens: their `buckets` [T], the summable [T] parts of each of BUCKET_SUMS, |d| [T].

        With `tokens` [T] each entry is a run of that many tokens, with its sums and its largest |d|.
        """
        largest = np.zeros(size)
        np.maximum.at(largest, buckets, distance)
        counts = np.bincount(buckets, tokens, size).astype(np.int64)
        totals = CompensatedSums.of_columns(sums_by_bucket(buckets, part, size) for part in parts)
        return cls(counts, totals, largest)

    def merge(self, other: BucketSums) -> BucketSums:
        """Return the sums over the tokens of both."""
        return BucketSums(
            self.tokens + other.tokens, self.sums + other.sums, np.maximum(self.max_abs_d, other.max_abs_d)
        )

    def mean_of(self, name: str, buckets: slice) -> tuple[int, float]:
        """Return the number of tokens in some buckets, and their mean of one of BUCKET_SUMS; NaN if none."""
        tokens = int(self.tokens[buckets].sum())
        total = math.fsum(self.sums.value[buckets, BUCKET_SUMS.index(name)].tolist())
        return tokens, total / tokens if tokens else math.nan

    def table(self, edges: tuple[float, ...]) -> BucketTable:
        """Return the means per bucket; NaN for an empty bucket."""
        tokens = self.tokens.astype(np.float64)
        with np.errstate(invalid="ignore", divide="ignore"):
            means = self.sums.value / tokens[:, None]
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
