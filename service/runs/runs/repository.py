"""Queries on runs."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import ColumnElement, bindparam, select, tuple_, update
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


def silent(session: Session, before_us: int) -> bool:
    """Return whether a running run was last seen before that time."""
    return session.scalar(select(Run.id).where(*_silent(before_us)).limit(1)) is not None


def set_stale(session: Session, before_us: int) -> list[tuple[str, int | None]]:
    """Set the state of the running runs that were last seen before that time; return their ids and newest steps."""
    statement = update(Run).where(*_silent(before_us)).values(state="stale").returning(Run.id, Run.last_step)
    found = session.execute(statement.execution_options(synchronize_session=False))
    return [(run_id, last_step) for run_id, last_step in found]


def _silent(before_us: int) -> tuple[ColumnElement[bool], ...]:
    return Run.state == "running", Run.seen_at_us < before_us, Run.deleted_at_us.is_(None)


def find_by_key(session: Session, project: str, key: str) -> Run | None:
    """Return the run with this project and client key, deleted ones included."""
    return session.scalar(select(Run).where(Run.project == project, Run.key == key))


def find_all_by_key(session: Session, key: str, limit: int) -> Sequence[Run]:
    """Return up to `limit` runs with this client key, in order of their projects, deleted ones included."""
    return session.scalars(select(Run).where(Run.key == key).order_by(Run.project).limit(limit)).all()


def newest_first(
    session: Session, project: str | None, key: str | None, after: tuple[int, str] | None, limit: int
) -> Sequence[Run]:
    """Return up to `limit` runs that are not deleted, newest first, older than `after` (created_at_us, id)."""
    query = select(Run).where(Run.deleted_at_us.is_(None))
    if project is not None:
        query = query.where(Run.project == project)
    if key is not None:
        query = query.where(Run.key == key)
    if after is not None:
        query = query.where(tuple_(Run.created_at_us, Run.id) < after)
    return session.scalars(query.order_by(Run.created_at_us.desc(), Run.id.desc()).limit(limit)).all()
