"""HTTP: changes within a run."""

from __future__ import annotations

from fastapi import APIRouter, Response, status

from foreshock.api.runs import ChangeRecord
from foreshock.changes import ChangeKind
from foreshock_service.platform.context import Context
from foreshock_service.platform.parameters import AttemptQuery, Cursor, Limit, Page, StepPath
from foreshock_service.platform.security import Ingester, Reader
from foreshock_service.runs.changes import service
from foreshock_service.runs.changes.service import ChangePut
from foreshock_service.runs.runs.addresses import RunIdentifier
from foreshock_service.runs.step_key import StepKey

router = APIRouter(prefix="/v1/runs/{run}/changes", tags=["changes"])


@router.put(
    "/{step}/{kind}",
    status_code=status.HTTP_201_CREATED,
    responses={200: {"model": ChangeRecord, "description": "It was announced before; the newer words hold"}},
)
def put_change(
    run: RunIdentifier,
    step: StepPath,
    kind: ChangeKind,
    body: ChangePut,
    context: Context,
    principal: Ingester,
    response: Response,
    attempt: AttemptQuery = 1,
) -> ChangeRecord:
    """Announce a change of the length cap, curriculum or data; the detectors' baselines begin anew at its step."""
    change, created = context.database.write(
        lambda session: service.announce_change(
            session, context.events, principal, StepKey(run, attempt, step), kind, body
        )
    )
    if not created:
        response.status_code = status.HTTP_200_OK
    return change


@router.get("")
def list_changes(
    run: RunIdentifier, context: Context, principal: Reader, cursor: Cursor = None, limit: Limit = 200
) -> Page[ChangeRecord]:
    """List changes by step: announced ones, and those of the setup that the rollouts name."""
    with context.database.read() as session:
        return service.list_changes(session, principal, run, cursor, limit)
