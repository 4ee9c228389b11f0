"""HTTP: steps."""

from __future__ import annotations

from fastapi import APIRouter

from foreshock.api.runs import StepRecord
from foreshock_service.platform.context import Context
from foreshock_service.platform.parameters import ActiveOrAttempt, Cursor, Limit, Page
from foreshock_service.platform.security import Reader
from foreshock_service.runs.runs.addresses import RunIdentifier
from foreshock_service.runs.steps import service

router = APIRouter(prefix="/v1/runs/{run}/steps", tags=["steps"])


@router.get("")
def list_steps(
    run: RunIdentifier,
    context: Context,
    principal: Reader,
    attempt: ActiveOrAttempt = None,
    cursor: Cursor = None,
    limit: Limit = 200,
) -> Page[StepRecord]:
    """List the steps of a run, in order."""
    with context.database.read() as session:
        return service.list_steps(session, principal, run, attempt, cursor, limit)
