"""Padded [N, L] arrays, as trainers hold them, cut down to flat values and offsets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foreshock.errors import InvalidRolloutsError
from foreshock.rollouts.arrays import as_array
from foreshock.rollouts.ragged import offsets_of_lengths
from foreshock.rollouts.schema import ROLLOUT_COLUMNS

__all__ = ["Padding", "flat_columns", "mask_of", "refuse_cell"]


@dataclass(frozen=True, slots=True, eq=False)
class Padding:
    """Where the tokens of N rows stand in [N, width] arrays.

    Row i has its tokens between `first[i]` and `stop[i]`; where `inside` [N, width] is not None, only those at which it
    is True.
    """

    width: int
    first: NDArray[np.int64]
    stop: NDArray[np.int64]
    inside: NDArray[np.bool_] | None

    @classmethod
    def of(cls, mask: NDArray[np.bool_], *, holes: bool) -> Padding:
        """Every row from its first True to its last, `holes` False: without the False ones between them."""
        rows, width = mask.shape
        if mask.size == 0:
            return cls(width, np.zeros(rows, np.int64), np.zeros(rows, np.int64), None)
        filled = mask.any(axis=1)
        first = np.where(filled, mask.argmax(axis=1), 0)
        stop = np.where(filled, width - mask[:, ::-1].argmax(axis=1), 0)
        whole = holes or int((stop - first).sum()) == int(np.count_nonzero(mask))
        return cls(width, first, stop, None if whole else mask)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """[N] the tokens of each row."""
        if self.inside is None:
            return self.stop - self.first
        return np.asarray(self.inside.sum(axis=1), dtype=np.int64)

    @property
    def offsets(self) -> NDArray[np.int64]:
        """[N + 1] where the rows begin and end in `flat`."""
        return offsets_of_lengths(self.lengths)

    def flat(self, values: Any, column: str, *, repeat: bool = False) -> NDArray[Any]:
        """[T] the values of the tokens, from [N, width]; with `repeat` also from [N], one value a row.

        Raises InvalidRolloutsError naming `column` where the shape is another.
        """
        array = as_array(values, column)
        rows = self.first.size
        if repeat and array.shape == (rows,):
            return np.repeat(array, self.lengths)
        if array.shape != (rows, self.width):
            wanted = f"{(rows, self.width)}" + (f" or {(rows,)}" if repeat else "")
            raise InvalidRolloutsError(
                f"has the shape {array.shape} and must have {wanted}, as its mask has", column=column
            )
        if self.inside is not None:
            return np.asarray(array[self.inside])
        # Rows are copied whole, which is many times faster than to look at a mask cell by cell.
        parts = [row[first:stop] for row, first, stop in zip(array, self.first, self.stop, strict=True)]
        return np.concatenate(parts) if parts else array.reshape(-1)


def mask_of(values: Any, column: str, shape: tuple[int, ...] | None = None) -> NDArray[np.bool_]:
    """[N, L] of 0 and 1 as booleans; raises InvalidRolloutsError naming `column` and the row where it is not that."""
    array = as_array(values, column)
    if array.ndim != 2 or (shape is not None and array.shape != shape):
        wanted = "[rollouts, tokens]" if shape is None else f"{shape}, as `response_mask` has"
        raise InvalidRolloutsError(f"has the shape {array.shape} and must have {wanted}", column=column)
    if array.dtype == np.bool_:
        return array
    mask = np.asarray(array != 0, dtype=np.bool_)
    refuse_cell(column, array, mask & (array != 1), "a mask holds 0 and 1")
    return mask


def refuse_cell(column: str, values: NDArray[Any], wrong: NDArray[np.bool_], message: str) -> None:
    """Raise InvalidRolloutsError for the first True of `wrong` [N, L], saying its row and its place in it."""
    if wrong.any():
        row, place = divmod(int(wrong.argmax()), wrong.shape[1])
        raise InvalidRolloutsError(f"{values[row, place]} at place {place}: {message}", row=row, column=column)


def flat_columns(padding: Padding, columns: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `from_arrays` for these columns of padded arrays or of one value a rollout."""
    known = {column.field: column for column in ROLLOUT_COLUMNS}
    flat: dict[str, Any] = {}
    for name, value in columns.items():
        column = known.get(name)
        if column is None or value is None:
            flat[name] = value  # which says that there is no such field
        elif column.shape == "response":
            flat[name] = padding.flat(value, column.name, repeat=name in ("turn", "weights_version"))
        elif column.shape == "rollout or response":
            array = as_array(value, column.name)
            flat["advantage_per_token"] = array.ndim == 2
            flat[name] = padding.flat(array, column.name) if array.ndim == 2 else array
        else:
            flat[name] = value
    return flat
