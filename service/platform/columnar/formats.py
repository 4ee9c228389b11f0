"""Columnar answers: JSON, CSV or Parquet by `format=`, else by Accept; with an entity tag, compressed if accepted."""

from __future__ import annotations

import io
import sys
import zlib
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, repeat
from typing import Annotated, Any, Literal

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
from fastapi import Query, Request, Response
from numpy.typing import NDArray

from foreshock_service.platform.columnar.table import Column, ColumnTable, Labels
from foreshock_service.platform.etag import content_etag, matches
from foreshock_service.platform.problem import NotAcceptable
from foreshock_service.platform.request_bodies import PARQUET_MEDIA_TYPE

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

JSON_MEDIA_TYPE = "application/json"
CSV_MEDIA_TYPE = "text/csv"
MEDIA_TYPES = {"json": JSON_MEDIA_TYPE, "csv": CSV_MEDIA_TYPE, "parquet": PARQUET_MEDIA_TYPE}

FormatName = Literal["json", "csv", "parquet"]
Format = Annotated[
    FormatName | None, Query(alias="format", description="format of the answer; absent: by the Accept header")
]
# Arrow imports pandas, if it is installed, when it makes its first array: not during a request.
pa.array([0])

# For `responses` of an endpoint that answers in these formats; its response model is the JSON.
FORMATS: dict[int | str, dict[str, Any]] = {
    200: {
        "content": {
            CSV_MEDIA_TYPE: {"schema": {"type": "string"}},
            PARQUET_MEDIA_TYPE: {"schema": {"type": "string", "format": "binary"}},
        }
    },
    304: {"description": "Unchanged since the answer whose ETag is in If-None-Match"},
}


def choose_format(accept: str | None, name: FormatName | None = None) -> str:
    """Return the media type of `format=`, else the one with the highest q in Accept, JSON on ties.

    Raises NotAcceptable if Accept names none of them.
    """
    if name is not None:
        return MEDIA_TYPES[name]
    accept = accept or "*/*"
    best, best_quality = "", 0.0
    for offered in MEDIA_TYPES.values():
        quality = _quality(accept, offered)
        if quality > best_quality:
            best, best_quality = offered, quality
    if not best:
        raise NotAcceptable(
            f"the Accept header matches no available media type; available: {', '.join(MEDIA_TYPES.values())}"
        )
    return best


def columnar_response(request: Request, body: bytes, media_type: str) -> Response:
    """Return the body with the entity tag of its content; 304 if the client has it.

    Takes milliseconds for a megabyte: call it in a thread, not in the event loop.
    """
    etag = content_etag(body)
    headers = {"ETag": etag, "Vary": "Accept, Accept-Encoding", "Cache-Control": "private, no-cache"}
    if matches(request.headers.get("if-none-match"), etag):
        return Response(status_code=304, headers=headers)
    body, encoding = compressed(body, request.headers.get("accept-encoding"))
    return Response(body, media_type=media_type, headers=headers | encoding)


def compressed(body: bytes, accept_encoding: str | None) -> tuple[bytes, dict[str, str]]:
    """Return the body by zstd or gzip, whichever is accepted, and the header that says so.

    Not Starlette's GZipMiddleware, which compresses in the event loop: 60 ms for the 4 MB of 20 measures over 10,000
    steps, during which no other request is served. Level 1: six times as fast as the default for JSON of numbers.
    """
    accepted = {
        name.strip()
        for name, _, quality in (each.partition(";") for each in (accept_encoding or "").lower().split(","))
        if quality.replace(" ", "") not in ("q=0", "q=0.0")
    }
    # A smaller body fits one packet anyway.
    if len(body) < 1024 or not accepted & {"zstd", "gzip", "*"}:
        return body, {}
    if accepted & {"zstd", "*"}:
        return zstd.compress(body, 1), {"Content-Encoding": "zstd"}
    compressor = zlib.compressobj(1, zlib.DEFLATED, 16 + zlib.MAX_WBITS)
    return compressor.compress(body) + compressor.flush(), {"Content-Encoding": "gzip"}


def render(table: ColumnTable, media_type: str, beside: Mapping[str, Any] | None = None) -> bytes:
    """Return the table in a format; a missing value is null, in CSV empty.

    `beside` has what JSON has beside `columns`; CSV and Parquet have the columns only.
    """
    if media_type == JSON_MEDIA_TYPE:
        columns = b",".join(
            orjson.dumps(name) + b":[" + _json_items(column) + b"]" for name, column in table.columns.items()
        )
        return b'{"columns":{' + columns + b"}" + (b"," + orjson.dumps(beside)[1:] if beside else b"}")
    arrow = pa.table({name: _arrow(column) for name, column in table.columns.items()})
    sink = io.BytesIO()
    if media_type == CSV_MEDIA_TYPE:
        pyarrow.csv.write_csv(arrow, sink)
    else:
        pq.write_table(arrow, sink, compression="zstd")
    return sink.getvalue()


def json_rows(fields: Sequence[tuple[bytes, Sequence[bytes]]], end: bytes = b"}") -> bytes:
    """Return JSON objects, a comma between them: of each row what precedes each value, and the value, then `end`.

    A dictionary of each row, turned into JSON, takes three times as long.
    """
    rows = len(fields[0][1])
    cells: list[Iterable[bytes]] = []
    for before, values in fields:
        cells += [repeat(before, rows), values]
    return b"".join(chain.from_iterable(zip(*cells, repeat(end + b",", rows), strict=True)))[:-1]


def json_values(column: Column) -> list[bytes]:
    """Return the JSON of each value of a column."""
    if isinstance(column, Labels):
        names = [orjson.dumps(name) for name in column.names]
        return [names[code] for code in column.codes.tolist()]
    if column.dtype == np.float32:
        # As Python's floats: with all digits of the number that was stored.
        column = column.astype(np.float64)
    items = _json_items(column)
    return items.split(b",") if items else []


def table_of_lists(lists: Mapping[str, Sequence[float | None]]) -> ColumnTable:
    """Return lists of numbers by name as a table, None as a missing value."""
    return ColumnTable({name: _numbers(values) for name, values in lists.items()})


def _numbers(values: Sequence[float | None]) -> NDArray[Any]:
    return np.array(values) if all(isinstance(each, int) for each in values) else np.array(values, dtype=np.float64)


def _json_items(column: Column) -> bytes:
    if isinstance(column, Labels):
        names = [orjson.dumps(name) for name in column.names]
        return b",".join([names[code] for code in column.codes.tolist()])
    # NaN and infinite values become null.
    return orjson.dumps(np.ascontiguousarray(column), option=orjson.OPT_SERIALIZE_NUMPY)[1:-1]


def _arrow(column: Column) -> pa.Array:
    if isinstance(column, Labels):
        return pa.DictionaryArray.from_arrays(column.codes, pa.array(column.names, pa.string())).cast(pa.string())
    if column.dtype.kind == "f":
        return pa.array(column, mask=~np.isfinite(column))
    return pa.array(column)


def _quality(accept: str, media_type: str) -> float:
    """Return the q of the most specific range that matches the type, 0 if none does."""
    found = (0, 0.0)
    for part in accept.split(",") if accept.strip() else ["*/*"]:
        name, *parameters = [piece.strip().lower() for piece in part.split(";")]
        if name not in ("*/*", media_type, media_type.partition("/")[0] + "/*"):
            continue
        specific = 3 - name.count("*")
        found = max(found, (specific, _q(parameters)))
    return found[1]


def _q(parameters: list[str]) -> float:
    for parameter in parameters:
        name, _, value = parameter.partition("=")
        if name.strip() == "q":
            try:
                return min(1.0, max(0.0, float(value)))
            except ValueError:
                return 0.0
    return 1.0
