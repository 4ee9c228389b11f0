"""Pieces of a batch: whole rollouts, about 131,000 tokens at a time, so that temporary arrays stay small."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from foreshock.rollouts.batch import RolloutBatch
from foreshock.rollouts.ragged import row_of_position

__all__ = ["Piece", "iterate_pieces", "row_ranges", "row_sums"]

_PIECE_TOKENS = 1 << 17

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """Consecutive rollouts of a batch from `first_row` on, with the columns of their T generated tokens, [T] each.

    Rollout i of the piece has the tokens `offsets[i]` to `offsets[i + 1]`. `places` [T] are the positions of the tokens
    in the batch; None if they are consecutive from `start`.
    """

    first_row: int
    start: int
    offsets: NDArray[np.int64]
    rollout: Floats | None
    trainer: Floats | None
    entropy: Floats | None
    places: NDArray[np.int64] | None = None

    @property
    def tokens(self) -> int:
        """T, the generated tokens of the piece."""
        return int(self.offsets[-1])

    def column(self, name: str) -> Floats | None:
        """Return `rollout`, `trainer` or `entropy` by name, shape [T]."""
        values: Floats | None = getattr(self, name)
        return values

    def place(self, index: int) -> int:
        """Return the position in the batch of a token of this piece."""
        return self.start + index if self.places is None else int(self.places[index])

    def select(self, keep: NDArray[np.bool_]) -> Piece:
        """Return the tokens at which `keep` [T] is True; the piece itself if that is all."""
        if keep.all():
            return self
        chosen = np.flatnonzero(keep)
        columns = {
            name: None if values is None else values[chosen]
            for name, values in (("rollout", self.rollout), ("trainer", self.trainer), ("entropy", self.entropy))
        }
        places = chosen + self.start if self.places is None else self.places[chosen]
        return Piece(self.first_row, self.start, np.searchsorted(chosen, self.offsets), places=places, **columns)


def iterate_pieces(batch: RolloutBatch) -> Iterator[Piece]:
    """Yield the generated tokens of the batch in pieces, in order."""
    offsets = batch.response_offsets
    for row, end_row in row_ranges(offsets):
        start, end = int(offsets[row]), int(offsets[end_row])
        piece = Piece(
            row,
            start,
            offsets[row : end_row + 1] - start,
            _part(batch.rollout_log_probs, start, end),
            _part(batch.trainer_log_probs, start, end),
            _part(batch.entropy, start, end),
        )
        yield piece if batch.response_mask is None else piece.select(batch.response_mask[start:end] != 0)


def row_ranges(offsets: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Yield (first, end) rows of each piece: as many rollouts as fit, and at least one."""
    row, rows = 0, offsets.size - 1
    while row < rows:
        end = min(max(row + 1, row_of_position(offsets, int(offsets[row]) + _PIECE_TOKENS)), rows)
        yield row, end
        row = end


def _part(values: Floats | None, start: int, end: int) -> Floats | None:
    return None if values is None else values[start:end]


def row_sums(
    values: NDArray[np.floating] | NDArray[np.integer] | NDArray[np.bool_], offsets: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Return the float64 sum of each row, shape [N]; 0 for an empty row."""
    sums = np.zeros(offsets.size - 1)
    starts = offsets[:-1]
    filled = (offsets[1:] > starts).nonzero()[0]
    if filled.size == sums.size > 0:
        # Nearly always: no row is empty.
        np.add.reduceat(values, starts, dtype=np.float64, out=sums)
    elif filled.size:
        sums[filled] = np.add.reduceat(values, starts[filled], dtype=np.float64)
    return sums
