"""HTTP: the audit."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query

from foreshock.api.service import AuditRecord
from foreshock_service.platform.audit import service
from foreshock_service.platform.context import Context
from foreshock_service.platform.pagination import Cursor, Limit, Page
from foreshock_service.platform.schemas import Name
from foreshock_service.platform.security import Administrator

router = APIRouter(prefix="/v1/audit", tags=["audit"])


@router.get("")
def list_audit(
    context: Context,
    principal: Administrator,
    actor: Annotated[Name | None, Query(description="only changes by this key or actor")] = None,
    action: Annotated[Name | None, Query(description="only this action")] = None,
    run: Annotated[Name | None, Query(description="only changes of the run with this id")] = None,
    cursor: Cursor = None,
    limit: Limit = 100,
) -> Page[AuditRecord]:
    """List who changed advice, alerts, runs and keys, newest first; for a key of one project, of that project."""
    filters = {"actor": actor, "action": action, "run_id": run}
    with context.database.read() as session:
        return service.list_entries(session, principal.project, filters, cursor, limit)
