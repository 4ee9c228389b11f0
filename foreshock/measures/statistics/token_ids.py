"""The mismatch by token id: exact sums for every id in memory, the 512 ids with the largest Σ k3 when stored.

The sums of dropped ids are bounded: an id that a stored part does not name has at most that part's `bound` of Σ k3.
Merging never drops ids, so any order of merging gives the same table.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from foreshock.measures.statistics.compensated_sums import CompensatedSums, summable_parts, sums_by_run

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
    sums: CompensatedSums
    covered: Float64
    bound: float = 0.0

    @classmethod
    def empty(cls) -> TokenIdSums:
        """Return sums without tokens."""
        return cls(
            np.zeros(0, np.int64), np.zeros(0, np.int64), CompensatedSums.zeros(0, len(TOKEN_ID_SUMS)), np.zeros(0)
        )

    @classmethod
    def of(cls, token_ids: NDArray[np.integer], values: Sequence[Float64]) -> TokenIdSums:
        """Return the sums over T tokens: non-negative ids [T], and [T] `values` of each of TOKEN_ID_SUMS."""
        if token_ids.size == 0:
            return cls.empty()
        ids, order = _sorted(token_ids)
        starts = np.flatnonzero(np.concatenate([[True], ids[1:] != ids[:-1]]))
        sums = CompensatedSums.of_columns(sums_by_run(starts, summable_parts(column[order])) for column in values)
        return cls(ids[starts], np.diff(starts, append=ids.size), sums, np.zeros(starts.size))

    def merge(self, other: TokenIdSums) -> TokenIdSums:
        """Return the sums over the tokens of both, with every id that either names."""
        ids = np.union1d(self.ids, other.ids)
        tokens, covered = np.zeros(ids.size, np.int64), np.zeros(ids.size)
        sums = CompensatedSums.zeros(ids.size, len(TOKEN_ID_SUMS))
        for part in (self, other):
            rows = np.searchsorted(ids, part.ids)
            tokens[rows] += part.tokens
            covered[rows] += part.covered
            sums.add_rows(rows, part.sums)
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
        most = self.sums.value[:, TOKEN_ID_SUMS.index("k3_kl")] + self.missing()
        falling = np.lexsort((self.ids, -most))
        rows = np.sort(falling[:limit])
        bound = max(self.bound, float(most[falling[limit]]))
        covered = bound - self.missing()[rows] if math.isfinite(bound) else np.full(rows.size, math.inf)
        sums = CompensatedSums(self.sums.high[rows], self.sums.low[rows])
        return TokenIdSums(self.ids[rows], self.tokens[rows], sums, covered, bound)

    def table(self, limit: int = KEPT_TOKEN_IDS) -> TokenIdTable:
        """Return the `limit` ids with the largest Σ k3, descending."""
        values = self.sums.value
        k3 = values[:, TOKEN_ID_SUMS.index("k3_kl")]
        candidates = np.arange(k3.size)
        if k3.size > limit:
            # Includes ties with the last one; NaN sorts above all numbers.
            candidates = np.flatnonzero(~(k3 < np.partition(k3, k3.size - limit)[k3.size - limit]))
        rows = candidates[np.lexsort((self.ids[candidates], -k3[candidates]))[:limit]]
        tokens = self.tokens[rows]
        means = values[rows] / tokens[:, None]
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


class TokenIdTotals:
    """Sums by token id that grow chunk by chunk: a row for each id of the batch."""

    def __init__(self, token_ids: NDArray[np.integer] | None) -> None:
        """Begin with empty sums for these ids (None: no ids)."""
        self._ids = np.unique(np.zeros(0, np.int64) if token_ids is None else token_ids).astype(np.int64)
        self._tokens = np.zeros(self._ids.size, np.int64)
        self._sums = CompensatedSums.zeros(self._ids.size, len(TOKEN_ID_SUMS))

    def add(self, token_ids: NDArray[np.integer], values: Sequence[Float64]) -> None:
        """Add T tokens; arguments as for `TokenIdSums.of`."""
        part = TokenIdSums.of(token_ids, values)
        rows = np.searchsorted(self._ids, part.ids)
        self._tokens[rows] += part.tokens
        self._sums.add_rows(rows, part.sums)

    def sums(self) -> TokenIdSums:
        """Return the sums of everything added."""
        found = np.flatnonzero(self._tokens)
        sums = CompensatedSums(self._sums.high[found], self._sums.low[found])
        return TokenIdSums(self._ids[found], self._tokens[found], sums, np.zeros(found.size))


def _sorted(token_ids: NDArray[np.integer]) -> tuple[Int64, Int64]:
    """Return the ids in ascending order, and their original positions."""
    bits = token_ids.size.bit_length()
    ids = token_ids.astype(np.int64)
    if int(ids.max()) >= 1 << (62 - bits):
        order = np.argsort(ids, kind="stable")
        return ids[order], order
    # Sorting (id, position) in one integer is several times faster than an argsort.
    keys = (ids << bits) | np.arange(ids.size)
    keys.sort()
    return keys >> bits, keys & ((1 << bits) - 1)
