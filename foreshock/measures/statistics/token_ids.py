"""The mismatch by token id: exact sums for every id while they are in memory, the 512 that matter most when stored.

What a cut leaves out is bounded: an id that a stored part does not name has at most that part's `bound` of Σ k3 in it.
Merging never cuts, so that any order of merging gives the same table.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from foreshock.measures.statistics.compensated_sums import CompensatedSums, summable_parts, sums_by_run

__all__ = ["KEPT_TOKEN_IDS", "TOKEN_ID_SUMS", "TokenIdSums", "TokenIdTable", "TokenIdTotals"]

TOKEN_ID_SUMS = ("d", "abs_d", "k3_kl")
KEPT_TOKEN_IDS = 512

Float64 = NDArray[np.float64]
Int64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class TokenIdSums:
    """`ids` [V] rising, `tokens` [V] and `sums` [V, 3] of TOKEN_ID_SUMS; `bound` is what a token id that is not named
    can have of Σ k3 in the parts that were cut, and `covered` [V] how much of `bound` is of parts that name the id: the
    true Σ k3 of an id lies between its sum and its sum + bound − covered. An id's `tokens` and other sums are of the
    parts that name it.
    """

    ids: Int64
    tokens: Int64
    sums: CompensatedSums
    covered: Float64
    bound: float = 0.0

    @classmethod
    def empty(cls) -> TokenIdSums:
        """No tokens."""
        return cls(
            np.zeros(0, np.int64), np.zeros(0, np.int64), CompensatedSums.zeros(0, len(TOKEN_ID_SUMS)), np.zeros(0)
        )

    @classmethod
    def of(cls, token_ids: NDArray[np.integer], values: Sequence[Float64]) -> TokenIdSums:
        """The sums over T tokens: their ids [T], which are not negative, and [T] `values` of each of TOKEN_ID_SUMS."""
        if token_ids.size == 0:
            return cls.empty()
        ids, order = _sorted(token_ids)
        starts = np.flatnonzero(np.concatenate([[True], ids[1:] != ids[:-1]]))
        sums = CompensatedSums.of_columns(sums_by_run(starts, summable_parts(column[order])) for column in values)
        return cls(ids[starts], np.diff(starts, append=ids.size), sums, np.zeros(starts.size))

    def merge(self, other: TokenIdSums) -> TokenIdSums:
        """The sums over the tokens of both, with every id that either names."""
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
        """[V] the most of each id's Σ k3 that cuts may have left out of its sum."""
        with np.errstate(invalid="ignore"):
            missing = self.bound - self.covered
        # ∞ − ∞: a cut left out an infinite sum, and whose is not known.
        return np.where(np.isnan(missing), math.inf, np.maximum(missing, 0.0))

    def kept(self, limit: int = KEPT_TOKEN_IDS) -> TokenIdSums:
        """The `limit` ids whose Σ k3 may be the largest; what the others may have is in the new `bound`."""
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
        """The `limit` ids with the largest Σ k3, falling."""
        values = self.sums.value
        k3 = values[:, TOKEN_ID_SUMS.index("k3_kl")]
        candidates = np.arange(k3.size)
        if k3.size > limit:
            # All that may be among them, ties with the last one included; a NaN is larger than any number here.
            candidates = np.flatnonzero(~(k3 < np.partition(k3, k3.size - limit)[k3.size - limit]))
        rows = candidates[np.lexsort((self.ids[candidates], -k3[candidates]))[:limit]]
        tokens = self.tokens[rows]
        means = values[rows] / tokens[:, None]
        return TokenIdTable(
            self.ids[rows], tokens, means[:, 0], means[:, 1], means[:, 2], k3[rows], self.missing()[rows], self.bound
        )


@dataclass(frozen=True, slots=True, eq=False)
class TokenIdTable:
    """Per token id, [V], the largest Σ k3 first: means over its tokens of d = log π − log μ, |d| and k3, in nats.

    The true Σ k3 of an id lies between `k3_sum` and `k3_sum` + `k3_sum_missing`; that of an id that is nowhere named is
    at most `k3_sum_unnamed`. Both are 0 where no part was cut.
    """

    token_ids: Int64
    tokens: Int64
    mean_d: Float64
    mean_abs_d: Float64
    k3_kl: Float64
    k3_sum: Float64
    k3_sum_missing: Float64
    k3_sum_unnamed: float


@dataclass(slots=True, eq=False)
class TokenIdTotals:
    """Sums by token id that grow chunk by chunk: a dense table where that is no larger than the batch, else parts."""

    dense_size: int
    tokens: Int64 = field(init=False)
    sums_dense: CompensatedSums = field(init=False)
    parts: list[TokenIdSums] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tokens = np.zeros(self.dense_size, np.int64)
        self.sums_dense = CompensatedSums.zeros(self.dense_size, len(TOKEN_ID_SUMS))

    @classmethod
    def for_ids(cls, token_ids: NDArray[np.integer] | None) -> TokenIdTotals:
        """Totals for these ids; None: there are none."""
        if token_ids is None or token_ids.size == 0:
            return cls(0)
        least, most = int(token_ids.min()), int(token_ids.max())
        return cls(most + 1 if least >= 0 and most < token_ids.size // 4 else 0)

    def add(self, token_ids: NDArray[np.integer], values: Sequence[Float64]) -> None:
        """Add T tokens, given as to `TokenIdSums.of`."""
        part = TokenIdSums.of(token_ids, values)
        if self.dense_size:
            self.tokens[part.ids] += part.tokens
            self.sums_dense.add_rows(part.ids, part.sums)
            return
        # Parts of about equal size are merged, so that each row is copied only a few times.
        while self.parts and self.parts[-1].ids.size <= 2 * part.ids.size:
            part = self.parts.pop().merge(part)
        self.parts.append(part)

    def sums(self) -> TokenIdSums:
        """All that was added."""
        if self.dense_size:
            ids = np.flatnonzero(self.tokens)
            sums = CompensatedSums(self.sums_dense.high[ids], self.sums_dense.low[ids])
            return TokenIdSums(ids, self.tokens[ids], sums, np.zeros(ids.size))
        total = TokenIdSums.empty()
        for part in reversed(self.parts):
            total = part.merge(total)
        return total


def _sorted(token_ids: NDArray[np.integer]) -> tuple[Int64, Int64]:
    """The ids in rising order, and where each stood."""
    bits = token_ids.size.bit_length()
    ids = token_ids.astype(np.int64)
    if int(ids.max()) >= 1 << (62 - bits):
        order = np.argsort(ids, kind="stable")
        return ids[order], order
    # One sort of id and place together is several times faster than a sort of places by id.
    keys = (ids << bits) | np.arange(ids.size)
    keys.sort()
    return keys >> bits, keys & ((1 << bits) - 1)
