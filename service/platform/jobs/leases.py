"""Leases of background jobs: rows in the database, compared with its own time."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from sqlalchemy import select, update
from sqlalchemy.orm import Session

from foreshock_service.platform.database.dialect import database_now_us, insert_if_absent
from foreshock_service.platform.database.tables import BackgroundJob


def claim(session: Session, names: Sequence[str], holder: str, interval_us: int, lease_us: int) -> list[str]:
    """Lease the jobs among `names` that no other process does and that are due; return their names, in that order."""
    now_us = database_now_us(session)
    rows = (
        select(BackgroundJob)
        .where(BackgroundJob.name.in_(names))
        .order_by(BackgroundJob.name)
        .with_for_update()
        .execution_options(populate_existing=True)
    )
    known = {row.name: row for row in session.scalars(rows)}
    for name in names:
        if name not in known:
            new = {"name": name, "holder": "", "leased_until_us": 0, "started_at_us": 0, "finished_at_us": None}
            insert_if_absent(session, BackgroundJob, new | {"runs": 0, "error": None})
    if len(known) < len(names):
        known = {row.name: row for row in session.scalars(rows)}
    claimed = []
    for name in names:
        row = known[name]
        if row.leased_until_us <= now_us and row.started_at_us <= now_us - interval_us:
            row.holder, row.leased_until_us, row.started_at_us = holder, now_us + lease_us, now_us
            row.finished_at_us = None
            claimed.append(name)
    return claimed


def extend(session: Session, names: Collection[str], holder: str, lease_us: int) -> None:
    """Extend the leases that this process has."""
    now_us = database_now_us(session)
    held = update(BackgroundJob).where(
        BackgroundJob.name.in_(names), BackgroundJob.holder == holder, BackgroundJob.leased_until_us > 0
    )
    session.execute(held.values(leased_until_us=now_us + lease_us))


def finish(session: Session, name: str, holder: str, error: str | None) -> None:
    """Record the end of a run and free the job, if this process still holds it."""
    row = session.scalar(
        select(BackgroundJob).where(BackgroundJob.name == name, BackgroundJob.holder == holder).with_for_update()
    )
    if row is not None:
        row.leased_until_us, row.finished_at_us = 0, database_now_us(session)
        row.runs += 1
        row.error = error


def all_jobs(session: Session) -> Sequence[BackgroundJob]:
    """Return every job that any process has done."""
    return session.scalars(select(BackgroundJob).order_by(BackgroundJob.name)).all()


def free(session: Session, names: Collection[str], holder: str) -> None:
    """Give up leases of this process."""
    held = update(BackgroundJob).where(BackgroundJob.name.in_(names), BackgroundJob.holder == holder)
    session.execute(held.values(leased_until_us=0))
