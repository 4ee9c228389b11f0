"""Sums of token values over rollouts, and the cluster of each rollout: what intervals by prompt group are made of."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = ["clusters_of", "sums_of_rollouts"]


def sums_of_rollouts(values: NDArray[np.float64], offsets: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the sums of `values` [T, …] over each rollout, [N, …]; an empty rollout has 0."""
    sums = np.zeros((offsets.size - 1, *values.shape[1:]))
    rows = np.flatnonzero(np.diff(offsets))
    if rows.size:
        sums[rows] = np.add.reduceat(values, offsets[rows], axis=0)
    return sums


def clusters_of(names: Sequence[str | None]) -> NDArray[np.int64]:
    """Return the number of each rollout's cluster, [N]: that of its prompt group, or its own if it has none."""
    keys = [f"r{row}" if name is None else f"g{name}" for row, name in enumerate(names)]
    return np.unique(keys, return_inverse=True)[1].astype(np.int64)
