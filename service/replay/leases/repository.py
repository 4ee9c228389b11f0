"""Queries on leases, and on jobs as a queue."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from sqlalchemy import ColumnElement, and_, or_, select, true
from sqlalchemy.orm import Session

from foreshock_service.platform.database.tables import Run
from foreshock_service.platform.database.tables.probes import Lease, Probe, ProbeJob
from foreshock_service.replay.probes.jobs import JobState

_DURATIONS_AHEAD = 10
"""A lease is granted for one duration. This many allow for a setting that was shortened, and for small corrections of
the clock."""

_KIND = (ProbeJob.needs, ProbeJob.accelerator, ProbeJob.environments, ProbeJob.environment_required)


class JobKind(NamedTuple):
    """Requirements of a job on its worker: scorers, accelerator and environments."""

    needs: str
    accelerator: str | None
    environments: str
    environment_required: bool


def find(session: Session, lease_id: str) -> tuple[Lease, ProbeJob, Probe, Run] | None:
    """Return the lease with its job, probe and run."""
    query = select(Lease, ProbeJob, Probe, Run).join(ProbeJob, ProbeJob.id == Lease.job_id).join(Probe)
    row = session.execute(query.join(Run, Run.id == Probe.run_id).where(Lease.id == lease_id)).one_or_none()
    return None if row is None else (row[0], row[1], row[2], row[3])


def probe_of(session: Session, job: ProbeJob) -> Probe:
    """Return the probe of a job."""
    return session.scalars(select(Probe).where(Probe.id == job.probe_id)).one()


def lock_job(session: Session, job_id: str) -> ProbeJob:
    """Return the current job, locked until the transaction ends."""
    query = select(ProbeJob).where(ProbeJob.id == job_id).with_for_update()
    return session.scalars(query.execution_options(populate_existing=True)).one()


def kinds_of_waiting_jobs(session: Session, project: str | None, accelerator: str) -> list[JobKind]:
    """Return the distinct kinds of the queued jobs for this accelerator: few, however many jobs there are."""
    query = select(*_KIND).join(Probe).join(Run, Run.id == Probe.run_id)
    return [JobKind(*row) for row in session.execute(query.where(_offered(project, accelerator)).distinct())]


def kind_of(job: ProbeJob) -> JobKind:
    """Return the kind of a job."""
    return JobKind(job.needs, job.accelerator, job.environments, job.environment_required)


def lock_next_job(
    session: Session, project: str | None, accelerator: str, kinds: Collection[JobKind]
) -> ProbeJob | None:
    """Return the first job of one of these kinds, by rank, locked; jobs that another claim holds are skipped."""
    query = (
        select(ProbeJob)
        .join(Probe)
        .join(Run, Run.id == Probe.run_id)
        .where(_offered(project, accelerator), or_(*map(_is_of_kind, kinds)))
        .order_by(ProbeJob.rank_us, ProbeJob.id)
        .limit(1)
        .with_for_update(skip_locked=True, of=ProbeJob)
    )
    return session.scalar(query.execution_options(populate_existing=True))


def add_lease(session: Session, lease: Lease) -> None:
    """Add a new lease."""
    session.add(lease)
    session.flush()


def lease_of(session: Session, job: ProbeJob) -> Lease:
    """Return the lease of a running job."""
    return session.scalars(select(Lease).where(Lease.id == job.lease_id)).one()


def any_overdue(session: Session, now_us: int, duration_us: int) -> bool:
    """Return whether a lease is past its end."""
    return session.scalar(select(ProbeJob.id).where(_overdue(now_us, duration_us)).limit(1)) is not None


def lock_overdue(session: Session, now_us: int, duration_us: int, limit: int) -> Sequence[ProbeJob]:
    """Return up to `limit` jobs whose lease is past its end, locked; jobs locked elsewhere are skipped."""
    query = select(ProbeJob).where(_overdue(now_us, duration_us)).order_by(ProbeJob.id).limit(limit)
    query = query.with_for_update(skip_locked=True).execution_options(populate_existing=True)
    return session.scalars(query).all()


def probes_without_checkpoint(session: Session, now_us: int, limit: int) -> Sequence[str]:
    """Return the ids of probes with queued jobs whose checkpoint has expired."""
    query = (
        select(Probe.id)
        .join(ProbeJob)
        .where(ProbeJob.state == JobState.QUEUED, Probe.checkpoint_expires_at_us <= now_us)
    )
    return session.scalars(query.distinct().limit(limit)).all()


def _offered(project: str | None, accelerator: str) -> ColumnElement[bool]:
    return (
        (ProbeJob.state == JobState.QUEUED)
        & (ProbeJob.accelerator.is_(None) | (ProbeJob.accelerator == accelerator))
        & Run.deleted_at_us.is_(None)
        & (true() if project is None else Run.project == project)
    )


def _is_of_kind(kind: JobKind) -> ColumnElement[bool]:
    return and_(*(column.is_not_distinct_from(value) for column, value in zip(_KIND, kind, strict=True)))


def _overdue(now_us: int, duration_us: int) -> ColumnElement[bool]:
    # A lease that ends that late was granted before the clock was set back.
    latest_us = now_us + _DURATIONS_AHEAD * duration_us
    ended = (ProbeJob.lease_expires_at_us <= now_us) | (ProbeJob.lease_expires_at_us > latest_us)
    return (ProbeJob.state == JobState.RUNNING) & ended
