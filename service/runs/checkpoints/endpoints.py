"""HTTP: checkpoints."""

from __future__ import annotations

from fastapi import APIRouter, Response, status

from foreshock.api.runs import CheckpointRecord
from foreshock_service.platform.context import Context
from foreshock_service.platform.pagination import Cursor, Limit, Page
from foreshock_service.platform.schemas import AttemptQuery, StepPath
from foreshock_service.platform.security import Ingester, Reader
from foreshock_service.runs.checkpoints import service
from foreshock_service.runs.checkpoints.schemas import CheckpointPut
from foreshock_service.runs.runs.addresses import RunIdentifier
from foreshock_service.runs.step_key import StepKey

router = APIRouter(prefix="/v1/runs/{run}/checkpoints", tags=["checkpoints"])


@router.put(
    "/{step}",
    status_code=status.HTTP_201_CREATED,
    responses={200: {"model": CheckpointRecord, "description": "It was announced before; the newer words hold"}},
)
def put_checkpoint(
    run: RunIdentifier,
    step: StepPath,
    body: CheckpointPut,
    context: Context,
    principal: Ingester,
    response: Response,
    attempt: AttemptQuery = 1,
) -> CheckpointRecord:
    """Announce the weights that sampled a step."""
    checkpoint, created = context.database.write(
        lambda session: service.announce_checkpoint(
            session, context.events, principal, StepKey(run, attempt, step), body
        )
    )
    if not created:
        response.status_code = status.HTTP_200_OK
    return checkpoint


@router.get("")
def list_checkpoints(
    run: RunIdentifier, context: Context, principal: Reader, cursor: Cursor = None, limit: Limit = 200
) -> Page[CheckpointRecord]:
    """List announced checkpoints, by step."""
    with context.database.read() as session:
        return service.list_checkpoints(session, principal, run, cursor, limit)
