"""HTTP: steps."""

from __future__ import annotations

from fastapi import APIRouter

from service.context import Context
from service.pagination import Cursor, Limit, Page
from service.schemas import RunIdentifier, SurvivingOrAttempt
from service.security import Reader
from service.steps import service
from service.steps.schemas import StepRead

router = APIRouter(prefix="/v1/runs/{run}/steps", tags=["steps"])


@router.get("")
def list_steps(
    run: RunIdentifier,
    context: Context,
    principal: Reader,
    attempt: SurvivingOrAttempt = None,
    cursor: Cursor = None,
    limit: Limit = 200,
) -> Page[StepRead]:
    """Steps in order."""
    with context.database.read() as session:
        return service.list_steps(session, principal, run, attempt, cursor, limit)
