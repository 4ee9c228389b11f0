"""Columns of equal length: numpy arrays, or labels by code. No row is ever an object."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Labels:
    """Column of strings: row i has `names[codes[i]]`."""

    codes: NDArray[np.int32]
    names: Sequence[str]

    def __len__(self) -> int:
        return len(self.codes)

    def __getitem__(self, chosen: Any) -> Labels:
        return Labels(self.codes[chosen], self.names)

    def strings(self) -> list[str]:
        """Return the string of each row."""
        return [self.names[code] for code in self.codes.tolist()]

    def ranks(self) -> NDArray[np.int32]:
        """Return integers, [rows], that sort as the strings do."""
        ranks = np.empty(len(self.names), dtype=np.int32)
        ranks[np.argsort(np.array(self.names, dtype=object), kind="stable")] = np.arange(len(self.names))
        return ranks[self.codes]


Column = NDArray[Any] | Labels


@dataclass(frozen=True, slots=True)
class ColumnTable:
    """Columns of equal length by name. NaN and infinite floats are missing values."""

    columns: Mapping[str, Column]

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return len(next(iter(self.columns.values())))

    @property
    def num_values(self) -> int:
        """Number of values: rows × columns."""
        return self.num_rows * len(self.columns)

    def rows(self, chosen: NDArray[Any]) -> ColumnTable:
        """Return the chosen rows: indices in their order, or a mask."""
        return ColumnTable({name: column[chosen] for name, column in self.columns.items()})

    def sorted_by(self, *names: str) -> ColumnTable:
        """Return the rows in the order of these columns, the first one first."""
        keys = [self.columns[name] for name in reversed(names)]
        return self.rows(np.lexsort([key.ranks() if isinstance(key, Labels) else key for key in keys]))

    def array(self, name: str) -> NDArray[Any]:
        """Return a column that has no labels."""
        column = self.columns[name]
        assert not isinstance(column, Labels), name
        return column

    def strings(self, name: str) -> list[str]:
        """Return a column of labels as strings."""
        column = self.columns[name]
        assert isinstance(column, Labels), name
        return column.strings()

    def groups(self, *names: str) -> list[tuple[int, int]]:
        """Return (first row, row after the last) of each stretch of rows that are equal in these columns."""
        if self.num_rows == 0:
            return []
        changed = np.zeros(self.num_rows - 1, dtype=bool)
        for name in names:
            column = self.columns[name]
            values = column.codes if isinstance(column, Labels) else column
            changed |= values[1:] != values[:-1]
        starts = [0, *(np.flatnonzero(changed) + 1).tolist()]
        return list(zip(starts, [*starts[1:], self.num_rows], strict=True))


def floats_or_none(values: NDArray[np.floating[Any]]) -> list[float | None]:
    """Return the values as Python floats, None for those that are not finite."""
    return [value if finite else None for value, finite in zip(values.tolist(), np.isfinite(values), strict=True)]
