"""Queries on workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sqlalchemy import ColumnElement, func, select, true, update
from sqlalchemy.orm import Session

from foreshock_service.platform.database.dialect import insert_if_absent
from foreshock_service.platform.database.tables.probes import Worker


def record(session: Session, worker: Worker) -> None:
    """Add the worker, or update when it was last seen and what it offers."""
    names = ("accelerator", "device_name", "environments", "scorers", "exact_pairs", "last_seen_at_us")
    row = {name: getattr(worker, name) for name in (*names, "project", "name", "first_seen_at_us")}
    if insert_if_absent(session, Worker, row):
        return
    known = session.get(Worker, (worker.project, worker.name), with_for_update=True)
    assert known is not None
    for name in names:
        setattr(known, name, getattr(worker, name))


def set_last_seen(session: Session, project: str, name: str, now_us: int) -> None:
    """Set when the worker was last seen."""
    same = (Worker.project == project, Worker.name == name)
    session.execute(update(Worker).where(*same).values(last_seen_at_us=now_us))


def newest(session: Session, project: str | None, limit: int) -> Sequence[Worker]:
    """Return up to `limit` workers that may work for the project, the one seen last first; None: of all projects."""
    query = select(Worker).where(_works_for(project)).order_by(Worker.last_seen_at_us.desc(), Worker.name)
    return session.scalars(query.limit(limit)).all()


def seen_since(session: Session, project: str | None, since_us: int) -> Sequence[Worker]:
    """Return the workers that may work for the project and were seen at `since_us` or later."""
    query = select(Worker).where(_works_for(project), Worker.last_seen_at_us >= since_us)
    return session.scalars(query.order_by(Worker.project, Worker.name)).all()


def count_seen_since(session: Session, project: str | None, since_us: int) -> Mapping[str, int]:
    """Return the number of workers seen at `since_us` or later, by accelerator."""
    query = select(Worker.accelerator, func.count()).where(_works_for(project), Worker.last_seen_at_us >= since_us)
    return dict(session.execute(query.group_by(Worker.accelerator)).all())


def _works_for(project: str | None) -> ColumnElement[bool]:
    """A worker whose key is bound to no project works for all."""
    return true() if project is None else Worker.project.in_(("", project))
