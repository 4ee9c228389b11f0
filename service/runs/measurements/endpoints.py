"""HTTP: measures, measurements, buckets and tokens."""

from __future__ import annotations

from typing import Annotated, Literal

import orjson
from fastapi import APIRouter, Query, Request, Response

from foreshock.api.records import from_attributes, parse, to_json
from foreshock.api.runs import Coverage, MeasureRecord
from foreshock.api.steps import BucketColumns, BucketsRecord, TokenIdColumns, TokenIdsRecord
from foreshock.comparisons import TRAINER_ROLLOUT
from foreshock.measures.registry import MEASURES
from foreshock.measures.statistics.bucket_sums import BucketTable
from foreshock.measures.statistics.conditions import CONDITIONS, Condition
from foreshock.measures.statistics.token_ids import KEPT_TOKEN_IDS, TokenIdTable
from foreshock_service.platform.columnar import (
    FORMATS,
    JSON_MEDIA_TYPE,
    Format,
    choose_format,
    columnar_response,
    render,
    table_of_lists,
)
from foreshock_service.platform.context import Context
from foreshock_service.platform.parameters import (
    LARGEST_STEP,
    ActiveOrAttempt,
    FromStep,
    MaxPoints,
    Name,
    Page,
    StepPath,
    ToStep,
)
from foreshock_service.platform.security import Reader
from foreshock_service.runs.attempts.service import resolve_step
from foreshock_service.runs.coverage import coverage_of_step, with_shards
from foreshock_service.runs.measurements import service
from foreshock_service.runs.measurements.schemas import MeasurementsRead
from foreshock_service.runs.runs.addresses import RunIdentifier

router = APIRouter(prefix="/v1", tags=["measurements"])

By = Literal["probability", "position", "turn", "length", "entropy", "lag", "token_id"]
Comparison = Annotated[Name, Query(description="`target/behaviour`")]


@router.get("/measures")
def list_measures(_: Reader) -> Page[MeasureRecord]:
    """List all registered measures."""
    return Page(items=[from_attributes(MeasureRecord, measure) for measure in MEASURES])


@router.get("/runs/{run}/measurements", response_model=MeasurementsRead, responses=FORMATS)
def read_measurements(
    run: RunIdentifier,
    request: Request,
    context: Context,
    principal: Reader,
    comparison: Annotated[list[Name] | None, Query(max_length=100, description="absent: all")] = None,
    measure: Annotated[list[Name] | None, Query(max_length=200, description="absent: all")] = None,
    from_step: FromStep = 0,
    to_step: ToStep = LARGEST_STEP,
    attempt: ActiveOrAttempt = None,
    max_points: MaxPoints = None,
    format_name: Format = None,
) -> Response:
    """Return curves over steps, by column: JSON, CSV or Parquet. A curve of `max_points` is one comparison."""
    media_type = choose_format(request.headers.get("accept"), format_name)
    query = service.CurveQuery(comparison or (), measure or (), attempt, from_step, to_step, max_points)
    with context.database.read() as session:
        curves = service.read_curves(session, context, principal, run, query)
    return columnar_response(request, render(curves.table, media_type, curves.beside()), media_type)


@router.get("/runs/{run}/steps/{step}/buckets", response_model=BucketsRecord | TokenIdsRecord, responses=FORMATS)
def read_buckets(
    run: RunIdentifier,
    step: StepPath,
    request: Request,
    context: Context,
    principal: Reader,
    comparison: Comparison = TRAINER_ROLLOUT,
    by: Annotated[By, Query(description="condition that defines the buckets")] = "probability",
    limit: Annotated[int, Query(ge=1, le=KEPT_TOKEN_IDS, description="maximum number of token ids")] = KEPT_TOKEN_IDS,
    attempt: ActiveOrAttempt = None,
    format_name: Format = None,
) -> Response:
    """Return the mismatch in buckets of the token's probability under the behaviour score, or of another condition.

    Buckets without tokens are included; if all are empty, the rollouts do not contain the condition. CSV and Parquet
    have a row for each bucket, low ≤ value < high (empty: unbounded), or for each token id.
    """
    media_type = choose_format(request.headers.get("accept"), format_name)
    with context.database.read() as session:
        statistics = service.read_statistics(session, principal, run, step, attempt, comparison)
        coverage = coverage_of_step(session, resolve_step(session, run, step, attempt), statistics.rollouts)
        if by == "token_id":
            found: BucketsRecord | TokenIdsRecord = _token_ids_read(statistics.token_id_table(limit), coverage)
        else:
            found = _buckets_read(CONDITIONS[by], statistics.condition_table(by), coverage)
        shown = to_json(with_shards(session, run, step, attempt, found))
    if media_type == JSON_MEDIA_TYPE:
        return columnar_response(request, orjson.dumps(shown), media_type)
    bounds = {"low": shown["edges"][:-1], "high": shown["edges"][1:]} if "edges" in shown else {}
    return columnar_response(request, render(table_of_lists({**bounds, **shown["columns"]}), media_type), media_type)


def _buckets_read(condition: Condition, table: BucketTable, coverage: Coverage) -> BucketsRecord:
    """Convert the table by a condition."""
    return BucketsRecord(
        by=condition.name,
        meaning=condition.meaning,
        unit=condition.unit,
        edges=tuple(table.edges.tolist()),
        columns=parse(BucketColumns, table.columns()),
        coverage=coverage,
    )


def _token_ids_read(table: TokenIdTable, coverage: Coverage) -> TokenIdsRecord:
    """Convert the table by token id."""
    floats = ("mean_abs_d", "mean_d", "k3_kl", "k3_sum", "k3_sum_missing")
    return TokenIdsRecord(
        coverage=coverage,
        k3_sum_unnamed=table.k3_sum_unnamed,
        columns=TokenIdColumns(
            token_id=tuple(table.token_ids.tolist()),
            tokens=tuple(table.tokens.tolist()),
            **{name: tuple(getattr(table, name).tolist()) for name in floats},
        ),
    )
