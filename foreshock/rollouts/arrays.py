"""Ragged arrays: flat values of all rows, and offsets [N + 1] at which rows begin and end.

Lists, torch tensors and padded [N, L] arrays of frameworks are converted to them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foreshock.errors import InvalidRolloutsError
from foreshock.rollouts.schema import ROLLOUT_COLUMNS, Side


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


def rows_of_positions(offsets: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the row of each flat position."""
    return np.searchsorted(offsets, positions, side="right") - 1


def row_ranges(offsets: NDArray[np.int64], most: int) -> Iterator[tuple[int, int]]:
    """Yield (first, end) of consecutive rows: as many as have at most `most` values together, and at least one."""
    first, rows = 0, offsets.size - 1
    while first < rows:
        end = min(max(first + 1, row_of_position(offsets, int(offsets[first]) + most)), rows)
        yield first, end
        first = end


def row_sums(values: NDArray[Any], offsets: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the float64 sum of each row, [N, …] of [T, …]; 0 for an empty row."""
    sums = np.zeros((offsets.size - 1, *values.shape[1:]))
    filled = np.flatnonzero(lengths_of_offsets(offsets))
    # Integers of up to 32 bits are summed as int64: twice as fast, and no row is long enough to overflow.
    dtype = np.int64 if values.dtype.kind in "iu" and values.dtype.itemsize <= 4 else np.float64
    if filled.size:
        sums[filled] = np.add.reduceat(values, offsets[filled], axis=0, dtype=dtype)
    return sums


def row_counts(flags: NDArray[np.bool_], offsets: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return how many of the flags [T] are set in each row, [N]."""
    if flags.all():
        return lengths_of_offsets(offsets)
    running = np.zeros(flags.size + 1, np.int64)
    np.cumsum(flags, out=running[1:])
    return lengths_of_offsets(running[offsets])


def take_rows(offsets: NDArray[np.int64], rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the flat positions of the chosen rows in their new order, and the new offsets."""
    new_offsets = offsets_of_lengths(lengths_of_offsets(offsets)[rows])
    shifts = np.repeat(offsets[:-1][rows] - new_offsets[:-1], lengths_of_offsets(new_offsets))
    return np.arange(new_offsets[-1], dtype=np.int64) + shifts, new_offsets


def as_array(value: Any, column: str) -> NDArray[Any]:
    """Return `value` as a numpy array, without a copy if memory can be shared.

    Accepts what `np.asarray` accepts and any dense torch tensor: on a device (copied to the CPU), part of a graph
    (detached), or of a type that numpy lacks, such as bfloat16 (converted to float32, which is exact). Torch is not
    imported. Raises InvalidRolloutsError naming `column` if the value is not an array.
    """
    try:
        return _of_tensor(value.detach().cpu()) if hasattr(value, "detach") else np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidRolloutsError(f"is not an array: {error}", column=column) from error


def names_of(values: Any, column: str) -> list[str | None]:
    """Return names of rollouts or groups as strings; whole numbers are converted, None is kept.

    Raises InvalidRolloutsError naming row and `column` for any other value.
    """
    if not isinstance(values, Sequence):
        values = as_array(values, column).tolist()
    return [_name(value, row, column) for row, value in enumerate(values)]


def _name(value: Any, row: int, column: str) -> str | None:
    if isinstance(value, int | np.integer) and not isinstance(value, bool):
        return str(value)
    if value is not None and not isinstance(value, str):
        raise InvalidRolloutsError(f"must be a string, not {type(value).__name__}", row=row, column=column)
    try:
        (value or "").encode()
    except UnicodeEncodeError as error:
        raise InvalidRolloutsError(f"cannot be encoded as UTF-8: {error}", row=row, column=column) from error
    return value


def _of_tensor(tensor: Any) -> NDArray[Any]:
    try:
        return np.asarray(tensor.numpy())
    except TypeError:
        return np.asarray(tensor.float().numpy())


@dataclass(frozen=True, slots=True, eq=False)
class Padding:
    """The places of the tokens of N rows in [N, width] arrays.

    The tokens of row i are those from `first[i]` up to `stop[i]`; if `inside` [N, width] is not None, only those at
    which `inside` is True.
    """

    width: int
    first: NDArray[np.int64]
    stop: NDArray[np.int64]
    inside: NDArray[np.bool_] | None

    @classmethod
    def of(cls, mask: NDArray[np.bool_], *, holes: bool) -> Padding:
        """Return each row from its first True to its last; with `holes=False`, without the False places in between."""
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
        """[N] tokens per row."""
        if self.inside is None:
            return self.stop - self.first
        return np.asarray(self.inside.sum(axis=1), dtype=np.int64)

    @property
    def offsets(self) -> NDArray[np.int64]:
        """[N + 1] positions at which the rows begin and end in the result of `flat`."""
        return offsets_of_lengths(self.lengths)

    def flat(self, values: Any, column: str, *, repeat: bool = False) -> NDArray[Any]:
        """Return the values of the tokens, [T], from [N, width]; with `repeat` also from [N], one value per row.

        Raises InvalidRolloutsError naming `column` for another shape.
        """
        array = as_array(values, column)
        rows = self.first.size
        if repeat and array.shape == (rows,):
            return np.repeat(array, self.lengths)
        if array.shape != (rows, self.width):
            expected = f"{(rows, self.width)}" + (f" or {(rows,)}" if repeat else "")
            raise InvalidRolloutsError(
                f"has the shape {array.shape} and must have {expected}, the shape of its mask", column=column
            )
        if self.inside is not None:
            return np.asarray(array[self.inside])
        # Copying slices of rows is many times faster than indexing with a mask.
        parts = [row[first:stop] for row, first, stop in zip(array, self.first, self.stop, strict=True)]
        return np.concatenate(parts) if parts else array.reshape(-1)


def mask_of(values: Any, column: str, shape: tuple[int, ...] | None = None) -> NDArray[np.bool_]:
    """Return a mask of 0 and 1 as booleans [N, L]. Raises InvalidRolloutsError naming `column` and row."""
    array = as_array(values, column)
    if array.ndim != 2 or (shape is not None and array.shape != shape):
        expected = "[rollouts, tokens]" if shape is None else f"{shape}, the shape of `response_mask`"
        raise InvalidRolloutsError(f"has the shape {array.shape} and must have {expected}", column=column)
    if array.dtype == np.bool_:
        return array
    mask = np.asarray(array != 0, dtype=np.bool_)
    refuse_cell(column, array, mask & (array != 1), "a mask holds 0 and 1")
    return mask


def refuse_cell(column: str, values: NDArray[Any], wrong: NDArray[np.bool_], message: str) -> None:
    """Raise InvalidRolloutsError for the first True of `wrong` [N, L], with its row and its place in the row."""
    if wrong.any():
        row, place = divmod(int(wrong.argmax()), wrong.shape[1])
        raise InvalidRolloutsError(f"{values[row, place]} at place {place}: {message}", row=row, column=column)


def flat_columns(columns: Mapping[str, Any], paddings: Mapping[Side, Padding]) -> dict[str, Any]:
    """Return arguments of `RolloutBatch.from_arrays` for columns of padded arrays or of one value per rollout.

    An unknown column is passed on: `from_arrays` refuses it.
    """
    known = {column.field: column for column in ROLLOUT_COLUMNS}
    flat: dict[str, Any] = {}
    for name, value in columns.items():
        column = known.get(name)
        if column is None or value is None or column.side is None:
            flat[name] = value
        elif column.level == "rollout or response token":
            array = as_array(value, column.name)
            flat["advantage_per_token"] = array.ndim == 2
            flat[name] = paddings[column.side].flat(array, column.name) if array.ndim == 2 else array
        else:
            flat[name] = paddings[column.side].flat(value, column.name, repeat=column.repeatable)
    return flat
