"""HTTP: scalars."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request, Response, status

from foreshock_service.platform.columnar import FORMATS, Format, choose_format, columnar_response, render
from foreshock_service.platform.context import Context
from foreshock_service.platform.parameters import (
    LARGEST_STEP,
    ActiveOrAttempt,
    AttemptQuery,
    FromStep,
    MaxPoints,
    Name,
    StepPath,
    ToStep,
)
from foreshock_service.platform.security import Ingester, Reader
from foreshock_service.runs.runs.addresses import RunIdentifier
from foreshock_service.runs.scalars import service
from foreshock_service.runs.scalars.service import ScalarsPut, ScalarsRead

router = APIRouter(prefix="/v1/runs/{run}", tags=["scalars"])


@router.put("/steps/{step}/scalars", status_code=status.HTTP_204_NO_CONTENT)
def put_scalars(
    run: RunIdentifier,
    step: StepPath,
    body: ScalarsPut,
    context: Context,
    principal: Ingester,
    attempt: AttemptQuery = 1,
) -> None:
    """Store a source's values for a step. The request is idempotent."""
    context.database.write(
        lambda session: service.put_scalars(session, context.events, principal, run, attempt, step, body)
    )


@router.get("/scalars", response_model=ScalarsRead, responses=FORMATS)
def read_scalars(
    run: RunIdentifier,
    request: Request,
    context: Context,
    principal: Reader,
    source: Annotated[list[Name] | None, Query(max_length=100)] = None,
    name: Annotated[list[Name] | None, Query(max_length=1000)] = None,
    attempt: ActiveOrAttempt = None,
    from_step: FromStep = 0,
    to_step: ToStep = LARGEST_STEP,
    max_points: MaxPoints = None,
    format_name: Format = None,
) -> Response:
    """Return scalars by column, ordered by name, source and step: JSON, CSV or Parquet.

    A curve of `max_points` is one name of one source.
    """
    media_type = choose_format(request.headers.get("accept"), format_name)
    query = service.ScalarQuery(source or (), name or (), attempt, from_step, to_step, max_points)
    with context.database.read() as session:
        table = service.read_scalars(session, context.settings, principal, run, query)
    return columnar_response(request, render(table, media_type), media_type)
