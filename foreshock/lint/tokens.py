"""The tokens that the checks look at: pieces of a batch, a few hundred thousand tokens at a time, cut between rollouts.

Working in pieces keeps temporaries small: the lint needs no more memory than a fraction of the batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from foreshock.rollouts.batch import RolloutBatch
from foreshock.rollouts.ragged import row_of_position

__all__ = ["Piece", "pieces_of", "row_ranges", "row_sums"]

_PIECE_TOKENS = 1 << 17

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """Some rollouts of a batch (`first_row` and on) and their model-generated tokens, [T] each, cut by `offsets`.

    `places` [T] are the tokens' places in the whole batch; None where they are `start` and on, without a gap.
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
        """T."""
        return int(self.offsets[-1])

    def column(self, name: str) -> Floats | None:
        """`rollout`, `trainer` or `entropy`."""
        values: Floats | None = getattr(self, name)
        return values

    def place(self, index: int) -> int:
        """Where a token of this piece is in the batch."""
        return self.start + index if self.places is None else int(self.places[index])

    def kept(self, keep: NDArray[np.bool_]) -> Piece:
        """The tokens where `keep` [T] is True; this very piece where all are."""
        if keep.all():
            return self
        chosen = np.flatnonzero(keep)
        columns = {
            name: None if values is None else values[chosen]
            for name, values in (("rollout", self.rollout), ("trainer", self.trainer), ("entropy", self.entropy))
        }
        places = chosen + self.start if self.places is None else self.places[chosen]
        return Piece(self.first_row, self.start, np.searchsorted(chosen, self.offsets), places=places, **columns)


def pieces_of(batch: RolloutBatch) -> Iterator[Piece]:
    """The batch in pieces, in order, of generated tokens only."""
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
        yield piece if batch.response_mask is None else piece.kept(batch.response_mask[start:end] != 0)


def row_ranges(offsets: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """The rows (first, end) of each piece: as many rollouts as fit, and at least one."""
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
    """[N] float64 sums of rows that may be empty."""
    sums = np.zeros(offsets.size - 1)
    filled = np.flatnonzero(np.diff(offsets))
    if filled.size:
        sums[filled] = np.add.reduceat(values, offsets[:-1][filled], dtype=np.float64)
    return sums
