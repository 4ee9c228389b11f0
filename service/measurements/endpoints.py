"""HTTP: measures, measurements, buckets and tokens."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response

from foreshock.measures.registry import MEASURES
from service.context import Context
from service.guards import PARQUET_MEDIA_TYPE
from service.measurements import service, tokens
from service.measurements.formats import CSV_MEDIA_TYPE, choose_format, render
from service.measurements.schemas import BucketColumns, BucketsRead, MeasurementsRead, MeasureRead, TokensRead
from service.pagination import Page
from service.schemas import LARGEST_STEP, FromStep, Name, RunIdentifier, StepPath, SurvivingOrAttempt, ToStep
from service.security import Reader

router = APIRouter(prefix="/v1", tags=["measurements"])

Comparison = Annotated[Name, Query(description="`target/behaviour`")]
_OTHER_FORMATS: dict[int | str, dict[str, Any]] = {
    200: {
        "content": {
            CSV_MEDIA_TYPE: {"schema": {"type": "string"}},
            PARQUET_MEDIA_TYPE: {"schema": {"type": "string", "format": "binary"}},
        }
    }
}


@router.get("/measures")
def list_measures(_: Reader) -> Page[MeasureRead]:
    """Every measure there is."""
    return Page(items=[MeasureRead.model_validate(measure) for measure in MEASURES])


@router.get("/runs/{run}/measurements", response_model=MeasurementsRead, responses=_OTHER_FORMATS)
def read_measurements(
    run: RunIdentifier,
    request: Request,
    context: Context,
    principal: Reader,
    comparison: Annotated[list[Name] | None, Query(max_length=100, description="absent: all")] = None,
    measure: Annotated[list[Name] | None, Query(max_length=200, description="absent: all")] = None,
    from_step: FromStep = 0,
    to_step: ToStep = LARGEST_STEP,
    attempt: SurvivingOrAttempt = None,
    max_points: Annotated[
        int | None, Query(ge=2, le=1_000_000, description="rows a comparison, keeping the extremes of each measure")
    ] = None,
) -> Response:
    """Curves over steps, by column: JSON, CSV or Parquet, by Accept."""
    media_type = choose_format(request.headers.get("accept", "*/*"))
    query = service.CurveQuery(comparison or (), measure or (), attempt, from_step, to_step, max_points)
    with context.database.read() as session:
        curves = service.read_curves(session, principal, run, query)
    return render(curves, media_type)


@router.get("/runs/{run}/steps/{step}/buckets")
def read_buckets(
    run: RunIdentifier,
    step: StepPath,
    context: Context,
    principal: Reader,
    comparison: Comparison = "trainer/rollout",
    attempt: SurvivingOrAttempt = None,
) -> BucketsRead:
    """Mismatch by the token's probability under the behaviour score."""
    with context.database.read() as session:
        table = service.read_buckets(session, principal, run, step, attempt, comparison)
    return BucketsRead(edges=table.edges.tolist(), columns=BucketColumns.model_validate(table.columns()))


@router.get("/runs/{run}/steps/{step}/tokens")
def read_tokens(
    run: RunIdentifier,
    step: StepPath,
    context: Context,
    principal: Reader,
    comparison: Comparison = "trainer/rollout",
    worst: Annotated[int, Query(ge=1, le=1000, description="how many tokens, by |d|")] = 20,
    sample_id: Annotated[str | None, Query(max_length=1024, description="instead: all tokens of this rollout")] = None,
    attempt: SurvivingOrAttempt = None,
) -> TokensRead:
    """The worst tokens of a step, or one rollout token by token, with each scorer's log-prob."""
    question = tokens.TokenQuestion(run, step, attempt, comparison, worst, sample_id)
    return tokens.read_tokens(context, principal, question)
