"""Columnar answers: numpy columns straight from the database, down-sampled, and sent as JSON, CSV or Parquet."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
from fastapi import Query, Request, Response
from fastapi.responses import FileResponse
from numpy.typing import NDArray
from sqlalchemy import Select
from sqlalchemy.orm import Session
from starlette.background import BackgroundTask

from foreshock_service.platform import compression, problem, request_guards
from foreshock_service.platform.settings import Settings
from foreshock_service.platform.store.tokens import TokenStore

Kind = Literal["integer", "float", "boolean", "label"]
_DTYPES: Mapping[Kind, type] = {"integer": np.int64, "float": np.float64, "boolean": np.bool_, "label": np.object_}
# Rows that are fetched at a time, as Python objects. Larger blocks are not faster.
_BLOCK_ROWS = 4096


class AnswerTooLarge(problem.ProblemError, status=422, problem_type="answer-too-large"):
    """A columnar answer with more values than a setting allows; the detail says how to ask for less."""


Column = NDArray[Any]


@dataclass(frozen=True, slots=True)
class ColumnTable:
    """Columns of equal length by name; labels are strings as objects. NaN and infinite floats are missing values."""

    columns: Mapping[str, Column]

    @property
    def num_rows(self) -> int:
        return len(next(iter(self.columns.values())))

    @property
    def num_values(self) -> int:
        return self.num_rows * len(self.columns)

    def rows(self, chosen: NDArray[Any]) -> ColumnTable:
        """Return the chosen rows: indices in their order, or a mask."""
        return ColumnTable({name: column[chosen] for name, column in self.columns.items()})

    def joined_with(self, other: ColumnTable) -> ColumnTable:
        return ColumnTable(
            {name: np.concatenate([column, other.columns[name]]) for name, column in self.columns.items()}
        )

    def sorted_by(self, *names: str) -> ColumnTable:
        """Return the rows sorted by these columns; the first one is the primary sort key."""
        # Labels by their ranks: `lexsort` takes no objects.
        keys = [np.unique(self.columns[name], return_inverse=True)[1] for name in reversed(names)]
        return self.rows(np.lexsort(keys))

    def array(self, name: str) -> NDArray[Any]:
        return self.columns[name]

    def strings(self, name: str) -> list[str]:
        labels: list[str] = self.columns[name].tolist()
        return labels

    def groups(self, *names: str) -> list[tuple[int, int]]:
        """Return (first row, row after the last) of each stretch of rows with equal values in these columns."""
        if self.num_rows == 0:
            return []
        changed = np.zeros(self.num_rows - 1, dtype=bool)
        for name in names:
            changed |= self.columns[name][1:] != self.columns[name][:-1]
        starts = [0, *(np.flatnonzero(changed) + 1).tolist()]
        return list(zip(starts, [*starts[1:], self.num_rows], strict=True))


def floats_or_none(values: NDArray[np.floating[Any]]) -> list[float | None]:
    return [value if finite else None for value, finite in zip(values.tolist(), np.isfinite(values), strict=True)]


def read_columns(
    session: Session, query: Select[Any], kinds: Mapping[str, Kind], most_values: int, constants: Mapping[str, str]
) -> ColumnTable:
    """Return the query's rows as columns. `kinds` maps names to types in the query's order; NULL becomes NaN.

    `constants` are label columns with one value, which the query does not select. The rows are not sorted. Raises
    AnswerTooLarge as soon as more than `most_values` values were read.
    """
    row_type = np.dtype([(name, _DTYPES[kind]) for name, kind in kinds.items() if name not in constants])
    blocks = [np.empty(0, row_type)]
    rows = 0
    # In parts: psycopg otherwise loads the whole result into memory.
    query = query.limit(most_values // len(kinds) + 1).execution_options(yield_per=_BLOCK_ROWS)
    for block in session.execute(query).partitions():
        rows += len(block)
        check_rows(rows, len(kinds), most_values)
        blocks.append(np.fromiter(map(tuple, block), row_type, len(block)))
    whole = np.concatenate(blocks)
    return ColumnTable(
        {name: np.full(rows, constants[name], np.object_) if name in constants else whole[name] for name in kinds}
    )


def most_values(settings: Settings, max_points: int | None) -> int:
    """Return how many values may be read for an answer: ten times as many if it is down-sampled."""
    return settings.max_answer_values * (1 if max_points is None else 10)


def check_rows(rows: int, columns: int, most_values: int) -> None:
    """Raise AnswerTooLarge if rows × columns exceeds `most_values`."""
    if rows > most_values // columns:
        raise AnswerTooLarge(
            f"the answer has more than {most_values // columns:,} rows of {columns} columns: ask for fewer names or a "
            "shorter range (from_step, to_step), add max_points, or raise FORESHOCK_MAX_ANSWER_VALUES"
        )


def check_answer(table: ColumnTable, most_values: int) -> None:
    if table.num_values > most_values:
        raise AnswerTooLarge(
            f"the answer has {table.num_values:,} values, more than the {most_values:,} of FORESHOCK_MAX_ANSWER_VALUES:"
            " ask for fewer names, a shorter range (from_step, to_step) or fewer max_points"
        )


def keep_extremes(table: ColumnTable, curves: Sequence[str], measures: Sequence[str], max_points: int) -> ColumnTable:
    """Keep about `max_points` rows per curve, as they were measured; nothing is averaged.

    A curve is a stretch of rows with equal values in the columns `curves`. Its first and last row are kept. The curve
    is divided into parts of equal length; each part keeps, for each measure, the rows with the smallest and the largest
    finite value. With many measures at least two rows per measure are kept, even beyond `max_points`.
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


JSON_MEDIA_TYPE = "application/json"
CSV_MEDIA_TYPE = "text/csv"
MEDIA_TYPES = {"json": JSON_MEDIA_TYPE, "csv": CSV_MEDIA_TYPE, "parquet": request_guards.PARQUET_MEDIA_TYPE}

FormatName = Literal["json", "csv", "parquet"]
Format = Annotated[
    FormatName | None, Query(alias="format", description="format of the answer; absent: by the Accept header")
]

# For `responses` of an endpoint that answers in these formats; its response model describes the JSON.
_PARQUET = {request_guards.PARQUET_MEDIA_TYPE: {"schema": {"type": "string", "format": "binary"}}}
PARQUET_FILE: dict[int | str, dict[str, Any]] = {200: {"content": _PARQUET}}
FORMATS: dict[int | str, dict[str, Any]] = {
    200: {"content": {CSV_MEDIA_TYPE: {"schema": {"type": "string"}}, **_PARQUET}},
    304: {"description": "Unchanged since the answer whose ETag is in If-None-Match"},
}


def choose_format(accept: str | None, name: FormatName | None = None) -> str:
    """Return the media type of `format=`, else the first of MEDIA_TYPES in Accept. Raises NotAcceptable without any."""
    if name is not None:
        return MEDIA_TYPES[name]
    accepted = {each.partition(";")[0].strip() for each in (accept or "*/*").lower().split(",")}
    for offered in MEDIA_TYPES.values():
        if accepted & {offered, offered.partition("/")[0] + "/*", "*/*"}:
            return offered
    raise problem.NotAcceptable(
        f"the Accept header matches no available media type; available: {', '.join(MEDIA_TYPES.values())}"
    )


def columnar_response(request: Request, body: bytes, media_type: str) -> Response:
    """Return the body with the entity tag of its content; 304 if the client already has it.

    Takes milliseconds for a megabyte: call it in a thread, not in the event loop.
    """
    etag = compression.content_etag(body)
    headers = {"ETag": etag, "Vary": "Accept, Accept-Encoding", "Cache-Control": "private, no-cache"}
    if compression.matches(request.headers.get("if-none-match"), etag):
        return Response(status_code=304, headers=headers)
    body, encoding = compression.compressed(body, request.headers.get("accept-encoding"))
    return Response(body, media_type=media_type, headers=headers | encoding)


def parquet_file(store: TokenStore, write: Callable[[Path], object], **headers: str) -> FileResponse:
    """Return the file that `write` writes, which is too large for memory; it is removed once it is sent."""
    path = store.temporary_file()
    try:
        write(path)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    sent = BackgroundTask(path.unlink, missing_ok=True)
    return FileResponse(path, media_type=request_guards.PARQUET_MEDIA_TYPE, headers=headers, background=sent)


def render(table: ColumnTable, media_type: str, beside: Mapping[str, Any] | None = None) -> bytes:
    """Return the table in this format. A missing value is null, in CSV empty.

    `beside` has further members of the JSON, next to `columns`; CSV and Parquet have the columns only.
    """
    if media_type == JSON_MEDIA_TYPE:
        # Joined once: each copy of a few megabytes takes a millisecond.
        parts = [b'{"columns":{']
        for name, column in table.columns.items():
            parts += [orjson.dumps(name), b":", _json_of(column), b","]
        parts[-1] = b"}"
        return b"".join([*parts, b"," + orjson.dumps(beside)[1:] if beside else b"}"])
    arrow = pa.table({name: _arrow(column) for name, column in table.columns.items()})
    sink = io.BytesIO()
    if media_type == CSV_MEDIA_TYPE:
        pyarrow.csv.write_csv(arrow, sink)
    else:
        pq.write_table(arrow, sink, compression="zstd")
    return sink.getvalue()


def table_of_lists(lists: Mapping[str, Sequence[float | None]]) -> ColumnTable:
    """Return lists of numbers by name as a table, None as a missing value."""
    are_whole = {name: all(isinstance(each, int) for each in values) for name, values in lists.items()}
    return ColumnTable({name: np.array(lists[name], None if are_whole[name] else np.float64) for name in lists})


def _json_of(column: Column) -> bytes:
    if column.dtype.kind == "O":
        return orjson.dumps(column.tolist())
    # NaN and infinite values become null.
    return orjson.dumps(np.ascontiguousarray(column), option=orjson.OPT_SERIALIZE_NUMPY)


def _arrow(column: Column) -> pa.Array:
    if column.dtype.kind == "f":
        return pa.array(column, mask=~np.isfinite(column))
    return pa.array(column, pa.string() if column.dtype.kind == "O" else None)
