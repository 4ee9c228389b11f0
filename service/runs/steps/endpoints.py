"""HTTP: steps."""

from __future__ import annotations

from fastapi import APIRouter

from service.platform.context import Context
from service.platform.pagination import Cursor, Limit, Page
from service.platform.schemas import ActiveOrAttempt
from service.platform.security import Reader
from service.runs.runs.addresses import RunIdentifier
from service.runs.steps import service
from service.runs.steps.schemas import StepRead

router = APIRouter(prefix="/v1/runs/{run}/steps", tags=["steps"])


@router.get("")
def list_steps(
    run: RunIdentifier,
    context: Context,
    principal: Reader,
    attempt: ActiveOrAttempt = None,
    cursor: Cursor = None,
    limit: Limit = 200,
) -> Page[StepRead]:
    """List the steps of a run, in order."""
    with context.database.read() as session:
        return service.list_steps(session, principal, run, attempt, cursor, limit)
