"""Runs as commands of an operator name them: by id, key or name."""

from __future__ import annotations

from sqlalchemy import or_, select
from sqlalchemy.orm import Session

from foreshock.errors import ConfigurationError
from foreshock_service.platform.database.tables import Run


def run_called(session: Session, name: str) -> Run:
    """Return the only run with this id, key or name that was not deleted; raises ConfigurationError."""
    called = or_(Run.id == name, Run.key == name, Run.name == name)
    runs = session.scalars(select(Run).where(called, Run.deleted_at_us.is_(None)).order_by(Run.created_at_us)).all()
    if not runs:
        raise ConfigurationError(f"there is no run {name}")
    if len(runs) > 1:
        raise ConfigurationError(f"more than one run is called {name}: {', '.join(run.id for run in runs)}")
    return runs[0]
