"""Queries on the audit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sqlalchemy import select, tuple_
from sqlalchemy.orm import Session

from foreshock_service.platform.database.tables import AuditEntry


def newest_first(
    session: Session,
    project: str | None,
    filters: Mapping[str, str | None],
    after: tuple[int, str] | None,
    limit: int,
) -> Sequence[AuditEntry]:
    """Return up to `limit` entries older than `after`; `filters` by column, None: any."""
    query = select(AuditEntry)
    if project is not None:
        query = query.where(AuditEntry.project == project)
    query = query.filter_by(**{name: value for name, value in filters.items() if value is not None})
    if after is not None:
        query = query.where(tuple_(AuditEntry.at_us, AuditEntry.id) < after)
    return session.scalars(query.order_by(AuditEntry.at_us.desc(), AuditEntry.id.desc()).limit(limit)).all()
