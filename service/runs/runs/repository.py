"""Queries on runs."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import bindparam, select, tuple_
from sqlalchemy.orm import Session

from service.platform.database.tables import Run

# This query runs for every change of a run, so it is built once.
_LOCK = (
    select(Run)
    .where(Run.id == bindparam("run_id"))
    .with_for_update(key_share=True)
    .execution_options(populate_existing=True)
)


def find(session: Session, run_id: str) -> Run | None:
    """Return the run with this id, deleted ones included."""
    return session.get(Run, run_id)


def find_and_lock(session: Session, run_id: str) -> Run | None:
    """Return the current run and lock it until this transaction ends."""
    return session.scalar(_LOCK, {"run_id": run_id})


def find_by_key(session: Session, project: str, key: str) -> Run | None:
    """Return the run with this project and client key, deleted ones included."""
    return session.scalar(select(Run).where(Run.project == project, Run.key == key))


def newest_first(session: Session, project: str | None, after: tuple[int, str] | None, limit: int) -> Sequence[Run]:
    """Return up to `limit` runs that are not deleted, newest first, older than `after` (created_at_us, id)."""
    query = select(Run).where(Run.deleted_at_us.is_(None))
    if project is not None:
        query = query.where(Run.project == project)
    if after is not None:
        query = query.where(tuple_(Run.created_at_us, Run.id) < after)
    return session.scalars(query.order_by(Run.created_at_us.desc(), Run.id.desc()).limit(limit)).all()
