"""Sums by prompt group for the errors of means; they merge also if a group is split over shards.

A group is kept under a 64-bit hash of its id with its own sums. A rollout without a group is a cluster by itself; for
these only sums of squares and products are kept, which is all that their residuals need.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from foreshock.measures.inputs import group_names

Float64 = NDArray[np.float64]

# Terms summed per cluster; the surprisal is −log μ − H.
CLUSTER_COLUMNS = ("d", "k3_kl", "surprisal", "chi2_token", "tv_token", "reverse_chi2_token")


@dataclass(frozen=True, slots=True, eq=False)
class ClusterSums:
    """Sums per group, and over rollouts without a group.

    `keys`, `tokens` [G] and `sums` [G, C] of CLUSTER_COLUMNS are per group; the `single_` fields are over all other
    rollouts.
    """

    keys: NDArray[np.uint64]
    tokens: NDArray[np.int64]
    sums: Float64
    single_count: int
    single_sums: Float64

    @classmethod
    def of(cls, tokens: NDArray[np.int64], sums: Float64, group_ids: Iterable[object] | None) -> ClusterSums:
        """Return the sums of N rollouts: `tokens` [N], `sums` [N, C]; rollouts without tokens are left out."""
        keys, grouped = group_keys(group_ids, tokens.size)
        measured = tokens > 0
        lone = measured & ~grouped
        grouped &= measured
        of_tokens = tokens[lone].astype(np.float64)
        of_sums = sums[lone]
        with np.errstate(over="ignore", invalid="ignore"):
            products = [np.square(of_tokens)[:, None], of_sums * of_tokens[:, None], np.square(of_sums)]
            of_singles = np.concatenate(products, axis=1).sum(axis=0)
        rows = np.flatnonzero(grouped)
        if rows.size == 0:
            unique = keys[:0]
            of_groups = tokens[:0]
            totals = sums[:0]
        else:
            unique, inverse = np.unique(keys[rows], return_inverse=True)
            order = rows[np.argsort(inverse, kind="stable")]
            starts = np.searchsorted(np.sort(inverse), np.arange(unique.size))
            of_groups, totals = np.add.reduceat(tokens[order], starts), np.add.reduceat(sums[order], starts, axis=0)
        return cls(unique, of_groups, totals, int(lone.sum()), of_singles)

    def merge(self, other: ClusterSums) -> ClusterSums:
        """Return the sums over the rollouts of both; the sums of groups that both have are added."""
        union = np.union1d(self.keys, other.keys)
        tokens = np.zeros(union.size, np.int64)
        sums = np.zeros((union.size, len(CLUSTER_COLUMNS)))
        for part in (self, other):
            slots = np.searchsorted(union, part.keys)
            tokens[slots] += part.tokens
            sums[slots] += part.sums
        singles = self.single_sums + other.single_sums
        return ClusterSums(union, tokens, sums, self.single_count + other.single_count, singles)

    @property
    def count(self) -> int:
        """The number of clusters."""
        return int(self.keys.size) + self.single_count

    def squared_residuals(self, column: str, mean: float) -> float:
        """Return Σ (S − mean·T)² over all clusters; S sums one of CLUSTER_COLUMNS, T counts tokens."""
        index = CLUSTER_COLUMNS.index(column)
        tokens_squared, *singles = self.single_sums.tolist()
        products, squares = singles[index], singles[len(CLUSTER_COLUMNS) + index]
        grouped = 0.0
        if self.keys.size:
            with np.errstate(over="ignore", invalid="ignore"):
                grouped = float(np.square(self.sums[:, index] - mean * self.tokens).sum())
        single: float = squares - 2.0 * mean * products + mean * mean * tokens_squared
        return grouped + max(single, 0.0) if not math.isnan(single) else math.nan

    def standardised(self, column: str, total: float) -> float:
        """Return `total` = Σ_g S_g over √(Σ_g S_g²): about standard normal if each cluster's S has the mean 0.

        NaN below two clusters, or if every S is 0.
        """
        square = self.squared_residuals(column, 0.0)
        return total / math.sqrt(square) if self.count >= 2 and 0.0 < square < math.inf else math.nan


def group_keys(group_ids: Iterable[object] | None, rollouts: int) -> tuple[NDArray[np.uint64], NDArray[np.bool_]]:
    """Return the 64-bit key of each rollout's group, [N], and whether it has one, [N]. Integers are valid names.

    Raises InvalidRolloutsError if the number of ids is not N.
    """
    keys = np.zeros(rollouts, dtype=np.uint64)
    if group_ids is None:
        return keys, np.zeros(rollouts, dtype=np.bool_)
    names = group_names(group_ids, rollouts)
    grouped = np.array([name is not None for name in names], dtype=np.bool_)
    keys[grouped] = keys_of_texts([name for name in names if name is not None])
    return keys, grouped


def keys_of_texts(texts: Sequence[str]) -> NDArray[np.uint64]:
    """Return a 64-bit key of each text, [N], the same in every process; equal texts are hashed once."""
    digests = {text: hashlib.blake2b(text.encode(errors="replace"), digest_size=8).digest() for text in set(texts)}
    return np.frombuffer(b"".join([digests[text] for text in texts]), "<u8").astype(np.uint64)


def clusters_of(names: Sequence[str | None]) -> NDArray[np.int64]:
    """Return the number of each rollout's cluster, [N]: that of its prompt group, or its own if it has none."""
    keys = [f"r{row}" if name is None else f"g{name}" for row, name in enumerate(names)]
    return np.unique(keys, return_inverse=True)[1].astype(np.int64)
