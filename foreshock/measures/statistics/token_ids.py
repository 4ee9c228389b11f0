"""The mismatch by token id: exact sums for every id in memory, the 512 ids with the largest Σ k3 when stored.

The sums of dropped ids are bounded: an id that a stored part does not name has at most that part's `bound` of Σ k3.
Merging never drops ids, so any order of merging gives the same table.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

TOKEN_ID_SUMS = ("d", "abs_d", "k3_kl")
KEPT_TOKEN_IDS = 512

Float64 = NDArray[np.float64]
Int64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class TokenIdSums:
    """Sums by token id: `ids` [V] ascending, `tokens` [V], `sums` [V, 3] of TOKEN_ID_SUMS in nats.

    `bound` is the largest Σ k3 that an unnamed id can have in the parts that were cut; `covered` [V] is the part of
    `bound` from the parts that name the id. The true Σ k3 of an id lies between its sum and its sum + bound − covered.
    An id's `tokens` and other sums are over the parts that name it.
    """

    ids: Int64
    tokens: Int64
    sums: Float64
    covered: Float64
    bound: float = 0.0

    @classmethod
    def empty(cls) -> TokenIdSums:
        """Return sums without tokens."""
        return cls(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros((0, len(TOKEN_ID_SUMS))), np.zeros(0))

    def merge(self, other: TokenIdSums) -> TokenIdSums:
        """Return the sums over the tokens of both, with every id that either names."""
        ids = np.union1d(self.ids, other.ids)
        tokens, covered = np.zeros(ids.size, np.int64), np.zeros(ids.size)
        sums = np.zeros((ids.size, len(TOKEN_ID_SUMS)))
        for part in (self, other):
            rows = np.searchsorted(ids, part.ids)
            tokens[rows] += part.tokens
            covered[rows] += part.covered
            sums[rows] += part.sums
        return TokenIdSums(ids, tokens, sums, covered, self.bound + other.bound)

    def missing(self) -> Float64:
        """Return the largest Σ k3 that cuts may have removed from the sum of each id, [V]."""
        with np.errstate(invalid="ignore"):
            missing = self.bound - self.covered
        # ∞ − ∞: a cut dropped an infinite sum of an unknown id.
        return np.where(np.isnan(missing), math.inf, np.maximum(missing, 0.0))

    def kept(self, limit: int = KEPT_TOKEN_IDS) -> TokenIdSums:
        """Return the `limit` ids whose Σ k3 may be the largest; `bound` of the result covers the others."""
        if self.ids.size <= limit:
            return self
        most = self.sums[:, TOKEN_ID_SUMS.index("k3_kl")] + self.missing()
        falling = np.lexsort((self.ids, -most))
        rows = np.sort(falling[:limit])
        bound = max(self.bound, float(most[falling[limit]]))
        covered = bound - self.missing()[rows] if math.isfinite(bound) else np.full(rows.size, math.inf)
        return TokenIdSums(self.ids[rows], self.tokens[rows], self.sums[rows], covered, bound)

    def table(self, limit: int = KEPT_TOKEN_IDS) -> TokenIdTable:
        """Return the `limit` ids with the largest Σ k3, descending."""
        k3 = self.sums[:, TOKEN_ID_SUMS.index("k3_kl")]
        candidates = np.arange(k3.size)
        if k3.size > limit:
            # Includes ties with the last one; NaN sorts above all numbers.
            candidates = np.flatnonzero(~(k3 < np.partition(k3, k3.size - limit)[k3.size - limit]))
        rows = candidates[np.lexsort((self.ids[candidates], -k3[candidates]))[:limit]]
        tokens = self.tokens[rows]
        means = self.sums[rows] / tokens[:, None]
        return TokenIdTable(
            self.ids[rows], tokens, means[:, 0], means[:, 1], means[:, 2], k3[rows], self.missing()[rows], self.bound
        )


@dataclass(frozen=True, slots=True, eq=False)
class TokenIdTable:
    """Means per token id, [V], by descending Σ k3: of d = log π − log μ, |d| and k3, in nats.

    The true Σ k3 of an id lies between `k3_sum` and `k3_sum` + `k3_sum_missing`; an id that no part names has at most
    `k3_sum_unnamed`. Both bounds are 0 if no part was cut.
    """

    token_ids: Int64
    tokens: Int64
    mean_d: Float64
    mean_abs_d: Float64
    k3_kl: Float64
    k3_sum: Float64
    k3_sum_missing: Float64
    k3_sum_unnamed: float
