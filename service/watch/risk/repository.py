"""Queries on the runs that may be at risk."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from sqlalchemy import select
from sqlalchemy.orm import Session

from foreshock_service.platform.database.tables import Alert, Run


def newest_with_standing_alerts(
    session: Session, projects: Collection[str], severities: Collection[str], limit: int
) -> Sequence[str]:
    """Return the ids of up to `limit` runs that have an open or acknowledged alert of these severities, newest first.

    The project must equal all of `projects`.
    """
    standing = select(Alert.run_id).where(
        Alert.run_id == Run.id, Alert.state.in_(("open", "acknowledged")), Alert.severity.in_(severities)
    )
    query = select(Run.id).where(Run.deleted_at_us.is_(None), standing.exists())
    query = query.where(*(Run.project == project for project in projects))
    return session.scalars(query.order_by(Run.created_at_us.desc(), Run.id.desc()).limit(limit)).all()
