"""Queries on runs."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import ColumnElement, func, or_, select, tuple_, update
from sqlalchemy.orm import Session

from foreshock_service.platform.database.tables import Run
from foreshock_service.runs.runs.schemas import RunFilter

UPLOAD_COLUMNS = ("last_step", "rollouts", "tokens", "last_shard_at_us", "seen_at_us", "state")
"""The columns of a run that an upload changes."""


def find(session: Session, run_id: str) -> Run | None:
    """Return the run with this id, deleted ones included."""
    return session.get(Run, run_id)


def find_access(session: Session, run_id: str) -> tuple[str, int | None] | None:
    """Return (project, deleted_at_us) of the run; None if there is none."""
    found = session.execute(select(Run.project, Run.deleted_at_us).where(Run.id == run_id)).first()
    return None if found is None else (found[0], found[1])


def note_upload(session: Session, run: Run, **values: object) -> None:
    """Set some of UPLOAD_COLUMNS of a locked run, in the database and in the loaded object."""
    for name, value in values.items():
        setattr(run, name, value)
    session.flush()


def find_and_lock(session: Session, run_id: str) -> Run | None:
    """Return the current run and lock it until this transaction ends."""
    query = select(Run).where(Run.id == run_id).with_for_update(key_share=True)
    return session.scalar(query.execution_options(populate_existing=True))


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


def newest_first(session: Session, chosen: RunFilter, after: tuple[int, str] | None, limit: int) -> Sequence[Run]:
    """Return up to `limit` runs that are not deleted, newest first, older than `after` (created_at_us, id)."""
    query = select(Run).where(Run.deleted_at_us.is_(None), *(Run.project == project for project in chosen.projects))
    for column, value in ((Run.key, chosen.key), (Run.model, chosen.model)):
        if value is not None:
            query = query.where(column == value)
    if chosen.model_kind is not None:
        query = query.where(func.coalesce(Run.declared_model_kind, Run.derived_model_kind) == chosen.model_kind)
    if chosen.states:
        query = query.where(Run.state.in_(chosen.states))
    if chosen.ids is not None:
        query = query.where(Run.id.in_(chosen.ids))
    if chosen.search is not None:
        found_in = (Run.name, Run.key)
        query = query.where(or_(*(each.icontains(chosen.search, autoescape=True) for each in found_in)))
    if after is not None:
        query = query.where(tuple_(Run.created_at_us, Run.id) < after)
    return session.scalars(query.order_by(Run.created_at_us.desc(), Run.id.desc()).limit(limit)).all()
