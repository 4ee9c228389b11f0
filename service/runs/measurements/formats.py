"""Measurements as JSON, CSV or Parquet, by content negotiation."""

from __future__ import annotations

import csv
import io
import json
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from fastapi import Response

from foreshock.json_values import finite_or_none
from service.platform.body_limits import PARQUET_MEDIA_TYPE
from service.platform.problem import NotAcceptable
from service.runs.measurements.curves import Curves

JSON_MEDIA_TYPE = "application/json"
CSV_MEDIA_TYPE = "text/csv"
_OFFERED = (JSON_MEDIA_TYPE, CSV_MEDIA_TYPE, PARQUET_MEDIA_TYPE)
_KEYS = ("step", "attempt", "comparison")


def choose_format(accept: str) -> str:
    """Return the offered media type with the highest q in an Accept header, JSON on ties; raise NotAcceptable."""
    best, best_quality = "", 0.0
    for offered in _OFFERED:
        quality = _quality(accept, offered)
        if quality > best_quality:
            best, best_quality = offered, quality
    if not best:
        raise NotAcceptable(f"the Accept header matches no available media type; available: {', '.join(_OFFERED)}")
    return best


def render(curves: Curves, media_type: str) -> Response:
    """Render the curves by column; a value that is not estimable is null, in CSV empty."""
    columns = _columns(curves)
    if media_type == JSON_MEDIA_TYPE:
        incomplete = [step.model_dump() for step in curves.incomplete]
        statistics = [step.model_dump() for step in curves.statistics]
        document = {"columns": columns, "incomplete_steps": incomplete, "statistics_steps": statistics}
        return Response(json.dumps(document, allow_nan=False), media_type=JSON_MEDIA_TYPE)
    if media_type == CSV_MEDIA_TYPE:
        return Response(_csv(columns), media_type=CSV_MEDIA_TYPE)
    return Response(_parquet(columns), media_type=PARQUET_MEDIA_TYPE)


def _columns(curves: Curves) -> dict[str, list[Any]]:
    columns: dict[str, list[Any]] = {
        name: [key[position] for key in curves.keys] for position, name in enumerate(_KEYS)
    }
    columns["from_sample"] = list(curves.from_sample)
    for position, name in enumerate(curves.measures):
        columns[name] = [finite_or_none(row[position]) for row in curves.values]
    return columns


def _csv(columns: dict[str, list[Any]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\r\n")
    writer.writerow(columns)
    writer.writerows(zip(*columns.values(), strict=True))
    return text.getvalue()


def _parquet(columns: dict[str, list[Any]]) -> bytes:
    types = {"step": pa.int64(), "attempt": pa.int64(), "comparison": pa.string(), "from_sample": pa.bool_()}
    arrays = {name: pa.array(values, type=types.get(name, pa.float64())) for name, values in columns.items()}
    sink = io.BytesIO()
    pq.write_table(pa.table(arrays), sink, compression="zstd")
    return sink.getvalue()


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
