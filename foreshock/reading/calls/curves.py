"""The calls that read curves over steps: measurements and scalars, as columns or as a file."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Literal

from foreshock.reading import columns
from foreshock.reading.columns import Measurements, Scalars
from foreshock.reading.parsing import parse
from foreshock.reading.request import Listing, Query, Request, json_request, run_path, several
from foreshock.reading.run_records import MeasureRecord

__all__ = ["ExportFormat", "export_measurements", "export_scalars", "measurements", "measures", "scalars"]

ExportFormat = Literal["csv", "parquet"]


def measures() -> Listing[MeasureRecord]:
    """Yield the registered measures."""
    read = partial(parse, MeasureRecord)
    return Listing("/v1/measures", [], read, in_project=False, is_paged=False)


def measurements(
    run: str,
    *,
    measures: Sequence[str] = (),
    comparisons: Sequence[str] = (),
    from_step: int = 0,
    to_step: int | None = None,
    attempt: int | None = None,
    max_points: int | None = None,
) -> Request[Measurements]:
    """Return curves over the steps `from_step` to `to_step` (included); no measures, no comparisons: all of them.

    `max_points` is the largest number of steps of a comparison; the extremes of each measure are among them.
    """
    query = _measurements_query(measures, comparisons, from_step, to_step, attempt, max_points)
    return json_request(run_path(run, "measurements"), query, columns.measurements)


def export_measurements(
    run: str,
    format: ExportFormat,  # noqa: A002
    *,
    measures: Sequence[str] = (),
    comparisons: Sequence[str] = (),
    from_step: int = 0,
    to_step: int | None = None,
    attempt: int | None = None,
    max_points: int | None = None,
) -> Request[bytes]:
    """Return the bytes of a CSV or Parquet file of what `measurements` returns."""
    query = _measurements_query(measures, comparisons, from_step, to_step, attempt, max_points)
    return _export(run_path(run, "measurements"), format, query)


def scalars(
    run: str,
    *,
    names: Sequence[str] = (),
    sources: Sequence[str] = (),
    from_step: int = 0,
    to_step: int | None = None,
    attempt: int | None = None,
    max_points: int | None = None,
) -> Request[Scalars]:
    """Return scalars over the steps `from_step` to `to_step` (included); no names, no sources: all of them.

    `max_points` is the largest number of steps of a curve, which is one name of one source; its extremes are kept.
    """
    query = _scalars_query(names, sources, from_step, to_step, attempt, max_points)
    return json_request(run_path(run, "scalars"), query, columns.scalars)


def export_scalars(
    run: str,
    format: ExportFormat,  # noqa: A002
    *,
    names: Sequence[str] = (),
    sources: Sequence[str] = (),
    from_step: int = 0,
    to_step: int | None = None,
    attempt: int | None = None,
    max_points: int | None = None,
) -> Request[bytes]:
    """Return the bytes of a CSV or Parquet file of what `scalars` returns."""
    query = _scalars_query(names, sources, from_step, to_step, attempt, max_points)
    return _export(run_path(run, "scalars"), format, query)


def _measurements_query(
    measures: Sequence[str],
    comparisons: Sequence[str],
    from_step: int,
    to_step: int | None,
    attempt: int | None,
    max_points: int | None,
) -> Query:
    names = [*several("measure", measures), *several("comparison", comparisons)]
    return [*names, *_range(from_step, to_step, attempt, max_points)]


def _scalars_query(
    names: Sequence[str],
    sources: Sequence[str],
    from_step: int,
    to_step: int | None,
    attempt: int | None,
    max_points: int | None,
) -> Query:
    chosen = [*several("name", names), *several("source", sources)]
    return [*chosen, *_range(from_step, to_step, attempt, max_points)]


def _range(from_step: int, to_step: int | None, attempt: int | None, max_points: int | None) -> Query:
    return [("from_step", from_step), ("to_step", to_step), ("attempt", attempt), ("max_points", max_points)]


def _export(path: str, format_name: ExportFormat, query: Query) -> Request[bytes]:
    return Request(path, [*query, ("format", format_name)], bytes, accept="*/*")
