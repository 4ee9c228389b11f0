"""Read a query into columns, in blocks of rows, with a cap on the number of values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import Select
from sqlalchemy.orm import Session

from foreshock_service.platform.columnar.table import Column, ColumnTable, Labels
from foreshock_service.platform.problem import ProblemError

Kind = Literal["integer", "float", "boolean", "label"]
_DTYPES: Mapping[Kind, type] = {"integer": np.int64, "float": np.float64, "boolean": np.bool_}
# Python objects of so many rows exist at a time; more gives no more speed.
_BLOCK_ROWS = 4096


class AnswerTooLarge(ProblemError):
    """A columnar answer with more values than a setting allows; the detail says how to ask for less."""

    status = 422
    problem_type = "answer-too-large"


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
