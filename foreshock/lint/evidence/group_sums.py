"""Sums by prompt group, from which the lint computes clustered errors."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from foreshock.measures.statistics.compensated_sums import CompensatedSums

__all__ = ["GROUP_COLUMNS", "GroupSums", "keys_of_texts"]

Keys = NDArray[np.uint64]

GROUP_COLUMNS = ("surprisal", "ratio_minus_one", "k3")


@dataclass(frozen=True, slots=True, eq=False)
class GroupSums:
    """Sums over the tokens of G prompt groups; a rollout without a group is a group of its own.

    `tokens` [G] counts the tokens with two log-probs; `sums` [G, 3] are Σ(−log μ − H) in nats, Σ(ρ − 1), and Σ k3 in
    nats.
    """

    keys: Keys
    tokens: NDArray[np.int64]
    sums: CompensatedSums

    @classmethod
    def of(cls, keys: Keys, tokens: NDArray[np.int64], sums: NDArray[np.float64]) -> GroupSums:
        """Return the sums by group of N rollouts with these group keys [N], tokens [N] and sums [N, 3]."""
        unique, inverse = np.unique(keys, return_inverse=True)
        totals = np.zeros((unique.size, len(GROUP_COLUMNS)))
        np.add.at(totals, inverse, sums)
        counted = np.bincount(inverse, tokens, unique.size).astype(np.int64)
        return cls(unique, counted, CompensatedSums(totals, np.zeros_like(totals)))

    def merge(self, other: GroupSums) -> GroupSums:
        """Return the groups of both; the sums of a common group are added."""
        union = np.union1d(self.keys, other.keys)
        tokens = np.zeros(union.size, np.int64)
        sums = CompensatedSums.zeros(union.size, len(GROUP_COLUMNS))
        for part in (self, other):
            slots = np.searchsorted(union, part.keys)
            tokens[slots] += part.tokens
            total = CompensatedSums(sums.high[slots], sums.low[slots]) + part.sums
            sums.high[slots], sums.low[slots] = total.high, total.low
        return GroupSums(union, tokens, sums)

    @property
    def count(self) -> int:
        """G."""
        return int(self.keys.size)

    def z_of_zero(self, column: str) -> float:
        """Return Σ_g S_g / √(Σ_g S_g²), the z score against a mean of 0, clustered by group."""
        values = self.sums.value[:, GROUP_COLUMNS.index(column)]
        square = float(np.square(values).sum())
        return float(values.sum()) / math.sqrt(square) if 0.0 < square < math.inf else math.nan

    def mean_and_t(self, column: str) -> tuple[float, float]:
        """Return the token mean and its Student's t against 0, clustered by group; NaN if not estimable."""
        values, total = self.sums.value[:, GROUP_COLUMNS.index(column)], int(self.tokens.sum())
        if total == 0:
            return math.nan, math.nan
        mean = float(values.sum()) / total
        groups = int((self.tokens > 0).sum())
        square = float(np.square(values - mean * self.tokens).sum())
        if groups < 2 or not math.isfinite(square):
            return mean, math.nan
        error = math.sqrt(square * groups / (groups - 1)) / total
        if error == 0.0:
            return mean, math.copysign(math.inf, mean) if mean else 0.0
        return mean, mean / error


def keys_of_texts(texts: Sequence[str]) -> Keys:
    """Return a 64-bit key of each text, shape [N], the same in every process; equal texts are hashed once."""
    known: dict[str, int] = {}
    for text in texts:
        if text not in known:
            known[text] = _key(text)
    return np.array([known[text] for text in texts], dtype=np.uint64)


def _key(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(errors="replace"), digest_size=8).digest(), "little")
