"""HTTP: single tokens of stored rollouts. Uploads are in `service/runs/ingest`."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from foreshock.api.steps import TokensRecord
from foreshock.comparisons import TRAINER_ROLLOUT
from foreshock_service.platform.columnar import (
    FORMATS,
    JSON_MEDIA_TYPE,
    Format,
    choose_format,
    columnar_response,
    render,
)
from foreshock_service.platform.context import Context
from foreshock_service.platform.parameters import ActiveOrAttempt, StepPath
from foreshock_service.platform.security import Reader
from foreshock_service.runs.measurements.endpoints import Comparison
from foreshock_service.runs.rollouts import tokens
from foreshock_service.runs.rollouts.schemas import tokens_json
from foreshock_service.runs.runs.addresses import RunIdentifier

router = APIRouter(prefix="/v1/runs/{run}/steps/{step}", tags=["rollouts"])


@router.get("/tokens", response_model=TokensRecord, responses=FORMATS)
def read_tokens(
    run: RunIdentifier,
    step: StepPath,
    request: Request,
    context: Context,
    principal: Reader,
    comparison: Comparison = TRAINER_ROLLOUT,
    worst: Annotated[int, Query(ge=1, le=1000, description="number of tokens, largest |d| first")] = 20,
    sample_id: Annotated[
        str | None, Query(max_length=tokens.LONGEST_SAMPLE_ID, description="return all tokens of this rollout instead")
    ] = None,
    from_position: Annotated[int, Query(ge=0, le=tokens.LARGEST_POSITION, description="first, of a rollout")] = 0,
    to_position: Annotated[
        int, Query(ge=0, le=tokens.LARGEST_POSITION, description="last, of a rollout")
    ] = tokens.LARGEST_POSITION,
    attempt: ActiveOrAttempt = None,
    format_name: Format = None,
) -> Response:
    """Return the worst tokens of a step, or one rollout token by token, with each scorer's log-prob.

    CSV and Parquet have a row for each token, and of each scorer a column `log_prob.` with its name.
    """
    media_type = choose_format(request.headers.get("accept"), format_name)
    query = tokens.TokenQuery(run, step, attempt, comparison, worst, sample_id, from_position, to_position)
    found = tokens.read_tokens(context, principal, query)
    body = tokens_json(found) if media_type == JSON_MEDIA_TYPE else render(found.table, media_type)
    return columnar_response(request, body, media_type)
