"""Queries on the rules of runs."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import select
from sqlalchemy.orm import Session

from foreshock_service.platform.database.tables import RulesVersion


def versions_of(session: Session, run_id: str) -> Sequence[RulesVersion]:
    """Return the versions of a run's rules, oldest first."""
    query = select(RulesVersion).where(RulesVersion.run_id == run_id).order_by(RulesVersion.version)
    return session.scalars(query).all()
