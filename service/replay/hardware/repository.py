"""Queries on workers and what they did."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import ColumnElement, func, select, true
from sqlalchemy.orm import Session

from service.platform.database.tables import Run
from service.platform.database.tables.probes import Probe, ProbeJob, Score, Worker
from service.replay.leases.transitions import JobState

ANY_ACCELERATOR = "any"


def newest_workers(session: Session, project: str | None, limit: int) -> Sequence[Worker]:
    """Workers, those that were seen last first; with a project, its own and those of none."""
    query = select(Worker).order_by(Worker.last_seen_at_us.desc(), Worker.name).limit(limit)
    if project is not None:
        query = query.where(Worker.project.in_(("", project)))
    return session.scalars(query).all()


def waiting_and_running(session: Session, project: str | None) -> Sequence[tuple[str, str, int]]:
    """(accelerator, state, how many) of the jobs that wait or run."""
    accelerator = func.coalesce(ProbeJob.accelerator, ANY_ACCELERATOR)
    query = (
        select(accelerator, ProbeJob.state, func.count())
        .join(Probe)
        .join(Run, Run.id == Probe.run_id)
        .where(_visible(project), ProbeJob.state.in_((JobState.QUEUED, JobState.RUNNING)))
        .group_by(accelerator, ProbeJob.state)
    )
    return session.execute(query).all()


def published_scores(session: Session, project: str | None) -> dict[tuple[str, str], int]:
    """How many scores were made on each (accelerator, device name)."""
    device = (Score.accelerator, Score.device_name)
    query = select(*device, func.count()).join(Run, Run.id == Score.run_id).where(_visible(project)).group_by(*device)
    return {(accelerator, name): count for accelerator, name, count in session.execute(query)}


def _visible(project: str | None) -> ColumnElement[bool]:
    return Run.deleted_at_us.is_(None) & (true() if project is None else Run.project == project)
