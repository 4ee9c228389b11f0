"""Tables by column: read from a query, sorted, down-sampled. No row is ever an object."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import Select
from sqlalchemy.orm import Session

from foreshock_service.platform.problem import ProblemError

Kind = Literal["integer", "float", "boolean", "label"]
_DTYPES: Mapping[Kind, type] = {"integer": np.int64, "float": np.float64, "boolean": np.bool_}
# Python objects of so many rows exist at a time; more gives no more speed.
_BLOCK_ROWS = 4096


class AnswerTooLarge(ProblemError):
    """A columnar answer with more values than a setting allows; the detail says how to ask for less."""

    status = 422
    problem_type = "answer-too-large"


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


def read_columns(session: Session, query: Select[Any], kinds: Mapping[str, Kind], most_values: int) -> ColumnTable:
    """Return the query's rows as columns; `kinds` names and types them in the order of the query, NULL is NaN.

    The rows are not sorted here. Raises AnswerTooLarge if they have more than `most_values` values, and reads no more.
    """
    most_rows = most_values // len(kinds)
    columns = [_Receiver(kind) for kind in kinds.values()]
    rows = 0
    for block in _blocks(session, query.limit(most_rows + 1)):
        rows += len(block)
        if rows > most_rows:
            raise AnswerTooLarge(
                f"the answer has more than {most_rows:,} rows of {len(kinds)} columns: ask for fewer names or a "
                "shorter range (from_step, to_step), add max_points, or raise FORESHOCK_MAX_ANSWER_VALUES "
                "(FORESHOCK_MAX_READ_VALUES with max_points)"
            )
        for column, values in zip(columns, zip(*block, strict=True), strict=True):
            column.add(values)
    return ColumnTable({name: column.column() for name, column in zip(kinds, columns, strict=True)})


def check_answer(table: ColumnTable, most_values: int) -> None:
    """Raise AnswerTooLarge if the answer has more than `most_values` values."""
    if table.num_values > most_values:
        raise AnswerTooLarge(
            f"the answer has {table.num_values:,} values, more than the {most_values:,} of FORESHOCK_MAX_ANSWER_VALUES:"
            " ask for fewer names, a shorter range (from_step, to_step) or fewer max_points"
        )


def _blocks(session: Session, query: Select[Any]) -> Iterator[Sequence[tuple[Any, ...]]]:
    connection = session.connection()
    if connection.dialect.name == "sqlite":
        result = connection.execute(query)
        # The driver's own rows: SQLAlchemy's take three times as long, and no column here needs a conversion.
        fetch = result.cursor.fetchmany
    else:
        # Streamed: psycopg would otherwise hold the whole answer.
        result = connection.execute(query, execution_options={"stream_results": True})
        fetch = result.fetchmany
    try:
        while block := fetch(_BLOCK_ROWS):
            yield block
    finally:
        result.close()


class _Receiver:
    """One column while its blocks arrive."""

    def __init__(self, kind: Kind) -> None:
        self._kind = kind
        self._blocks: list[NDArray[Any]] = []
        self._codes: dict[str, int] = {}

    def add(self, values: tuple[Any, ...]) -> None:
        """Add a block of values."""
        if self._kind == "label":
            codes = self._codes
            self._blocks.append(np.array([codes.setdefault(value, len(codes)) for value in values], dtype=np.int32))
        else:
            self._blocks.append(np.array(values, dtype=_DTYPES[self._kind]))

    def column(self) -> Column:
        """Return the whole column."""
        dtype = np.int32 if self._kind == "label" else _DTYPES[self._kind]
        whole = np.concatenate(self._blocks) if self._blocks else np.empty(0, dtype)
        self._blocks.clear()
        return Labels(whole, tuple(self._codes)) if self._kind == "label" else whole


def keep_extremes(table: ColumnTable, curves: Sequence[str], measures: Sequence[str], max_points: int) -> ColumnTable:
    """Keep at most about `max_points` rows per curve, as they were measured and never averaged.

    A curve is a stretch of rows with equal values in the columns `curves`. Its first and last row stay; between them
    each of equally long stretches keeps, for each measure, the row of its smallest and of its largest finite value.
    With many measures there are at least two rows a measure, whatever `max_points`.
    """
    values = [table.array(name) for name in measures]
    kept = [_of_one_curve(values, first, end, max_points) for first, end in table.groups(*curves)]
    return table.rows(np.concatenate(kept)) if kept else table


def _of_one_curve(measures: Sequence[NDArray[np.float64]], first: int, end: int, max_points: int) -> NDArray[np.int64]:
    count = end - first
    if count <= max_points:
        return np.arange(first, end)
    stretches = max(1, (max_points - 2) // max(1, 2 * len(measures)))
    length = math.ceil(count / stretches)
    whole = math.ceil(count / length)
    starts = first + length * np.arange(whole)
    kept = [np.array([first, end - 1])]
    for measure in measures:
        # An overflowed value is shown as missing, so it must not be selected as the largest one.
        values = np.full(whole * length, np.nan)
        values[:count] = np.where(np.isfinite(measure[first:end]), measure[first:end], np.nan)
        table = values.reshape(whole, length)
        present = ~np.isnan(table).all(axis=1)
        if present.any():
            kept += [starts[present] + pick(table[present], axis=1) for pick in (np.nanargmin, np.nanargmax)]
    return np.unique(np.concatenate(kept))
