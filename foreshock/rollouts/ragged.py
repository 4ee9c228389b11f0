"""Ragged arrays: flat values of all rows, and offsets [N + 1] at which rows begin and end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["concatenate_offsets", "lengths_of_offsets", "offsets_of_lengths", "row_of_position", "take_rows"]


def offsets_of_lengths(lengths: Any) -> NDArray[np.int64]:
    """Return the offsets [N + 1] of rows with these lengths [N]."""
    lengths = np.asarray(lengths, dtype=np.int64)
    offsets = np.zeros(lengths.size + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def lengths_of_offsets(offsets: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the lengths [N] of the rows between offsets [N + 1], as `np.diff` does, in a fifth of its time."""
    lengths: NDArray[np.int64] = offsets[1:] - offsets[:-1]
    return lengths


def concatenate_offsets(parts: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    """Return the offsets of concatenated ragged arrays."""
    return offsets_of_lengths(np.concatenate([lengths_of_offsets(part) for part in parts] or [np.zeros(0, np.int64)]))


def row_of_position(offsets: NDArray[np.int64], position: int) -> int:
    """Return the row of a flat position."""
    return int(np.searchsorted(offsets, position, side="right")) - 1


def take_rows(offsets: NDArray[np.int64], rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the flat positions of the chosen rows in their new order, and the new offsets."""
    new_offsets = offsets_of_lengths(lengths_of_offsets(offsets)[rows])
    shifts = np.repeat(offsets[:-1][rows] - new_offsets[:-1], lengths_of_offsets(new_offsets))
    return np.arange(new_offsets[-1], dtype=np.int64) + shifts, new_offsets
