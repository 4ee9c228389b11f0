"""HTTP: deletion of rollouts by their ids."""

from __future__ import annotations

from fastapi import APIRouter, status

from foreshock.api.runs import DeletionRecord
from foreshock_service.platform.context import Context
from foreshock_service.platform.pagination import Cursor, Limit, Page
from foreshock_service.platform.security import Administrator
from foreshock_service.runs.deletions import service
from foreshock_service.runs.deletions.schemas import DeletionCreate
from foreshock_service.runs.runs.addresses import RunIdentifier

router = APIRouter(prefix="/v1/runs/{run}/deletions", tags=["deletions"])


@router.post("", status_code=status.HTTP_202_ACCEPTED)
def request_deletion(
    run: RunIdentifier, body: DeletionCreate, context: Context, principal: Administrator
) -> DeletionRecord:
    """Delete the tokens of rollouts by sample or group id, now and when they are sent again; aggregates stay."""
    made = context.database.write(lambda session: service.request_deletion(session, principal, run, body))
    return service.deletion_record(made)


@router.get("")
def list_deletions(
    run: RunIdentifier, context: Context, principal: Administrator, cursor: Cursor = None, limit: Limit = 50
) -> Page[DeletionRecord]:
    """List the deletions of the run, newest first, and how far they are."""
    with context.database.read() as session:
        return service.deletions_of_run(session, principal, run, cursor, limit)
