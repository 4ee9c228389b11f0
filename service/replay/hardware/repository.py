"""Queries on the jobs and scores of each accelerator."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import ColumnElement, func, select, true
from sqlalchemy.orm import Session

from foreshock_service.platform.database.tables import Run
from foreshock_service.platform.database.tables.probes import Probe, ProbeJob, Score
from foreshock_service.replay.probes.job_transitions import JobState

ANY_ACCELERATOR = "any"


def waiting_and_running(session: Session, project: str | None) -> Sequence[tuple[str, str, int]]:
    """Return (accelerator, state, count) of the queued and running jobs."""
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
    """Return the number of published scores by (accelerator, device name)."""
    device = (Score.accelerator, Score.device_name)
    query = select(*device, func.count()).join(Run, Run.id == Score.run_id).where(_visible(project)).group_by(*device)
    return {(accelerator, name): count for accelerator, name, count in session.execute(query)}


def _visible(project: str | None) -> ColumnElement[bool]:
    return Run.deleted_at_us.is_(None) & (true() if project is None else Run.project == project)
