"""Queries on leases, and on jobs as a queue."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from sqlalchemy import ColumnElement, select, true, update
from sqlalchemy.orm import Session

from service.platform.database.dialect import insert_if_absent
from service.platform.database.tables import Run
from service.platform.database.tables.probes import Lease, Probe, ProbeJob, Worker
from service.replay.leases.transitions import JobState


def find(session: Session, lease_id: str) -> tuple[Lease, ProbeJob, Probe] | None:
    """The lease with its job and probe."""
    query = select(Lease, ProbeJob, Probe).join(ProbeJob, ProbeJob.id == Lease.job_id).join(Probe)
    row = session.execute(query.where(Lease.id == lease_id)).one_or_none()
    return None if row is None else (row[0], row[1], row[2])


def lock_job(session: Session, job_id: str) -> ProbeJob:
    """The job, locked until the transaction ends, as it is now."""
    query = select(ProbeJob).where(ProbeJob.id == job_id).with_for_update()
    return session.scalars(query.execution_options(populate_existing=True)).one()


def needs_of_waiting_jobs(session: Session, project: str | None, accelerator: str) -> list[str]:
    """The different `needs` among the jobs that wait, for this accelerator; few, however many jobs there are."""
    query = select(ProbeJob.needs).join(Probe).join(Run, Run.id == Probe.run_id)
    return list(session.scalars(query.where(_offered(project, accelerator)).distinct()))


def lock_next_job(session: Session, project: str | None, accelerator: str, needs: Collection[str]) -> ProbeJob | None:
    """The job that waits longest with one of these `needs`, locked; one that another claim looks at is passed over."""
    query = (
        select(ProbeJob)
        .join(Probe)
        .join(Run, Run.id == Probe.run_id)
        .where(_offered(project, accelerator), ProbeJob.needs.in_(needs))
        .order_by(ProbeJob.queued_at_us, ProbeJob.id)
        .limit(1)
        .with_for_update(skip_locked=True, of=ProbeJob)
    )
    return session.scalar(query.execution_options(populate_existing=True))


def add_lease(session: Session, lease: Lease) -> None:
    """Add a lease that was just granted."""
    session.add(lease)
    session.flush()


def lease_of(session: Session, job: ProbeJob) -> Lease:
    """The lease that a running job is under."""
    return session.scalars(select(Lease).where(Lease.id == job.lease_id)).one()


def any_overdue(session: Session, now_us: int) -> bool:
    """Whether a lease has ended without a word."""
    return session.scalar(select(ProbeJob.id).where(_overdue(now_us)).limit(1)) is not None


def lock_overdue(session: Session, now_us: int, limit: int) -> Sequence[ProbeJob]:
    """Jobs whose lease has ended without a word, locked; those that another one looks at are passed over."""
    query = select(ProbeJob).where(_overdue(now_us)).order_by(ProbeJob.id).limit(limit)
    query = query.with_for_update(skip_locked=True).execution_options(populate_existing=True)
    return session.scalars(query).all()


def probes_without_checkpoint(session: Session, now_us: int, limit: int) -> Sequence[str]:
    """Probes that wait for a checkpoint that has expired meanwhile."""
    query = (
        select(Probe.id)
        .join(ProbeJob)
        .where(ProbeJob.state == JobState.QUEUED, Probe.checkpoint_expires_at_us <= now_us)
    )
    return session.scalars(query.distinct().limit(limit)).all()


def note_worker(session: Session, worker: Worker) -> None:
    """Add the worker, or what is new about it: when it was seen, and what it can do now."""
    names = ("accelerator", "device_name", "scorers", "last_seen_at_us")
    row = {name: getattr(worker, name) for name in (*names, "project", "name", "first_seen_at_us")}
    if insert_if_absent(session, Worker, row):
        return
    known = session.get(Worker, (worker.project, worker.name), with_for_update=True)
    assert known is not None
    for name in names:
        setattr(known, name, getattr(worker, name))


def touch_worker(session: Session, project: str, name: str, now_us: int) -> None:
    """The worker was just heard of."""
    same = (Worker.project == project, Worker.name == name)
    session.execute(update(Worker).where(*same).values(last_seen_at_us=now_us))


def _offered(project: str | None, accelerator: str) -> ColumnElement[bool]:
    return (
        (ProbeJob.state == JobState.QUEUED)
        & (ProbeJob.accelerator.is_(None) | (ProbeJob.accelerator == accelerator))
        & Run.deleted_at_us.is_(None)
        & (true() if project is None else Run.project == project)
    )


def _overdue(now_us: int) -> ColumnElement[bool]:
    return (ProbeJob.state == JobState.RUNNING) & (ProbeJob.lease_expires_at_us <= now_us)
