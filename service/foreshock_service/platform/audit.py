"""The audit: an append-only record of who changed advice, alerts, runs and keys.

Callers pass names and states, never secrets or rollouts.
"""

from collections.abc import Mapping
from typing import Annotated, Any

from fastapi import Query
from sqlalchemy import select
from sqlalchemy.orm import Session

from foreshock.api import records, service
from foreshock.clock import now_us
from foreshock_service.platform import parameters, security
from foreshock_service.platform.context import Context
from foreshock_service.platform.database.engine import insert_rows
from foreshock_service.platform.database.tables import AuditEntry, new_identifier


def record(
    session: Session,
    author: security.Principal,
    action: str,
    subject: str,
    *,
    project: str | None = None,
    run_id: str | None = None,
    before: Mapping[str, Any] | None = None,
    after: Mapping[str, Any] | None = None,
) -> None:
    """Append an entry in the transaction of the change: `action` is `noun.verb`, `subject` the id of what changed."""
    row = {
        "id": new_identifier("audit"),
        "at_us": now_us(),
        "actor": author.actor,
        "action": action,
        "subject": subject,
        "project": project,
        "run_id": run_id,
        "before": dict(before) if before is not None else None,
        "after": dict(after) if after is not None else None,
        "request_id": author.request_id,
    }
    insert_rows(session, AuditEntry, [row])


router = parameters.api_router(prefix="/v1/audit", tags=["audit"])


@router.get("")
def list_audit(
    context: Context,
    principal: security.Administrator,
    actor: Annotated[parameters.Name | None, Query(description="only changes by this key or actor")] = None,
    action: Annotated[parameters.Name | None, Query(description="only this action")] = None,
    run: Annotated[parameters.Name | None, Query(description="only changes of the run with this id")] = None,
    cursor: parameters.Cursor = None,
    limit: parameters.Limit = 100,
) -> parameters.Page[service.AuditRecord]:
    """List who changed advice, alerts, runs and keys, newest first; for a key of one project, of that project."""
    chosen = {"actor": actor, "action": action, "run_id": run, "project": principal.project}
    query = select(AuditEntry).filter_by(**{name: value for name, value in chosen.items() if value is not None})
    with context.database.read() as session:
        return parameters.page_of_query(
            session, query, (AuditEntry.at_us, AuditEntry.id), cursor, limit,
            lambda rows: [records.from_attributes(service.AuditRecord, row) for (row,) in rows],
        )  # fmt: skip
