"""HTTP: attempts."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Response, status

from foreshock.api.records import from_attributes
from foreshock.api.runs import AttemptRecord
from foreshock_service.platform.context import Context
from foreshock_service.platform.parameters import LARGEST_STEP, Cursor, Limit, Page
from foreshock_service.platform.security import Ingester, Reader
from foreshock_service.runs.attempts import service
from foreshock_service.runs.attempts.schemas import AttemptCreate, Heartbeat
from foreshock_service.runs.runs.addresses import RunIdentifier

router = APIRouter(prefix="/v1/runs/{run}/attempts", tags=["attempts"])


@router.post(
    "", status_code=status.HTTP_201_CREATED, responses={200: {"model": AttemptRecord, "description": "It existed"}}
)
def create_attempt(
    run: RunIdentifier, body: AttemptCreate, context: Context, principal: Ingester, response: Response
) -> AttemptRecord:
    """Get or create the attempt of this key: 201 if it is new. A step is active in the newest attempt that holds it."""
    attempt, created = context.database.write(
        lambda session: service.get_or_create_attempt(session, context.events, principal, run, body)
    )
    if not created:
        response.status_code = status.HTTP_200_OK
    return from_attributes(AttemptRecord, attempt)


@router.put("/{attempt}/clients/{client}", status_code=status.HTTP_204_NO_CONTENT)
def put_heartbeat(
    run: RunIdentifier,
    attempt: Annotated[int, Path(ge=1, le=LARGEST_STEP)],
    client: Annotated[str, Path(max_length=200, pattern=r"^[A-Za-z0-9._-]+$")],
    body: Heartbeat,
    context: Context,
    principal: Ingester,
) -> None:
    """Note that a client of the attempt lives, and what it could not deliver."""
    context.database.write(
        lambda session: service.note_heartbeat(session, context.events, principal, run, attempt, client, body)
    )


@router.get("")
def list_attempts(
    run: RunIdentifier, context: Context, principal: Reader, cursor: Cursor = None, limit: Limit = 200
) -> Page[AttemptRecord]:
    """List the attempts of a run, in order."""
    with context.database.read() as session:
        return service.list_attempts(session, principal, run, cursor, limit)
