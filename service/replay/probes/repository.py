"""Queries on probes and their jobs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence

from sqlalchemy import Select, select, tuple_
from sqlalchemy.orm import Session

from foreshock_service.platform.database.tables import Checkpoint, Run
from foreshock_service.platform.database.tables.probes import Lease, Probe, ProbeJob
from foreshock_service.replay.near_alerts import is_near_open_alert
from foreshock_service.replay.probes.job_transitions import JobState
from foreshock_service.runs.attempts.active_attempts import AttemptStart, is_active
from foreshock_service.runs.step_key import StepKey


def find(session: Session, probe_id: str) -> Probe | None:
    """Return the probe with this id."""
    return session.get(Probe, probe_id)


def find_by_request(session: Session, run_id: str, request_digest: str) -> Probe | None:
    """Return the probe of an equal request."""
    return session.scalar(select(Probe).where(Probe.run_id == run_id, Probe.request_digest == request_digest))


def newest_of_run(
    session: Session, run_id: str, step: int | None, after: tuple[int, str] | None, limit: int
) -> Sequence[Probe]:
    """Return up to `limit` probes of a run (and step), newest first, older than `after` (created_at_us, id)."""
    query = select(Probe).where(Probe.run_id == run_id)
    if step is not None:
        query = query.where(Probe.step == step)
    if after is not None:
        query = query.where(tuple_(Probe.created_at_us, Probe.id) < after)
    return session.scalars(query.order_by(Probe.created_at_us.desc(), Probe.id.desc()).limit(limit)).all()


def newest_of_runs(
    session: Session, projects: Collection[str], kind: str | None, after: tuple[int, str] | None, limit: int
) -> Sequence[Probe]:
    """Return up to `limit` probes of runs that are not deleted, newest first, older than `after` (created_at_us, id).

    `projects`: names that the run's project must equal, all of them.
    """
    query = select(Probe).join(Run, Run.id == Probe.run_id).where(Run.deleted_at_us.is_(None))
    query = query.where(*(Run.project == project for project in projects))
    if kind is not None:
        query = query.where(Probe.kind == kind)
    if after is not None:
        query = query.where(tuple_(Probe.created_at_us, Probe.id) < after)
    return session.scalars(query.order_by(Probe.created_at_us.desc(), Probe.id.desc()).limit(limit)).all()


def jobs_of(session: Session, probe_ids: Iterable[str]) -> dict[str, list[ProbeJob]]:
    """Return the jobs of each probe, ordered by engine."""
    query = select(ProbeJob).where(ProbeJob.probe_id.in_(list(probe_ids))).order_by(ProbeJob.engine)
    jobs: dict[str, list[ProbeJob]] = defaultdict(list)
    for job in session.scalars(query):
        jobs[job.probe_id].append(job)
    return jobs


def lock_jobs(session: Session, probe_id: str) -> list[ProbeJob]:
    """Return the current jobs of a probe, locked in the order of their ids until the transaction ends."""
    query = select(ProbeJob).where(ProbeJob.probe_id == probe_id).order_by(ProbeJob.id).with_for_update()
    return list(session.scalars(query.execution_options(populate_existing=True)))


def running_leases(session: Session, jobs: Iterable[ProbeJob]) -> dict[str, Lease]:
    """Return the running leases of jobs by job id."""
    held = [job.lease_id for job in jobs if job.lease_id is not None]
    return {lease.job_id: lease for lease in session.scalars(select(Lease).where(Lease.id.in_(held)))}


def run_of(session: Session, probe: Probe) -> Run:
    """Return the run of a probe."""
    return session.scalars(select(Run).where(Run.id == probe.run_id)).one()


def earlier_checkpoints(session: Session, attempts: Sequence[AttemptStart], key: StepKey) -> Sequence[Checkpoint]:
    """Return the checkpoints announced for steps before `key.step` that led to it, by step."""
    led = [each for each in attempts if each.attempt <= key.attempt]
    chosen = is_active(led, Checkpoint.attempt, Checkpoint.step, 0, key.step - 1)
    query = select(Checkpoint).where(Checkpoint.run_id == key.run_id, chosen, Checkpoint.step < key.step)
    return session.scalars(query.order_by(Checkpoint.step)).all()


def find_checkpoint(session: Session, run_id: str, attempt: int, step: int) -> Checkpoint | None:
    """Return the checkpoint that was announced for a step."""
    return session.get(Checkpoint, (run_id, attempt, step))


def newest_checkpoints(session: Session, run_id: str, attempt: int, most: int) -> list[int]:
    """Return the newest announced steps of an attempt, at most `most` of them, in order."""
    query = select(Checkpoint.step).where(Checkpoint.run_id == run_id, Checkpoint.attempt == attempt)
    return sorted(session.scalars(query.order_by(Checkpoint.step.desc()).limit(most)))


def is_step_near_open_alert(session: Session, run_id: str, step: int) -> bool:
    """Return whether the run has an open alert near the step."""
    return bool(session.scalar(select(is_near_open_alert(run_id, step))))


def has_jobs_to_raise(session: Session, to: str) -> bool:
    """Return whether `jobs_to_raise` returns any."""
    return session.scalar(_jobs_to_raise(to, 1)) is not None


def jobs_to_raise(session: Session, to: str, limit: int) -> Sequence[ProbeJob]:
    """Return up to `limit` queued jobs near an open alert, locked, of probes that ask for no priority."""
    query = _jobs_to_raise(to, limit).with_for_update(skip_locked=True, of=ProbeJob)
    return session.scalars(query.execution_options(populate_existing=True)).all()


def _jobs_to_raise(to: str, limit: int) -> Select[ProbeJob]:
    near = is_near_open_alert(Probe.run_id, Probe.step)
    return (
        select(ProbeJob)
        .join(Probe)
        .where(ProbeJob.state == JobState.QUEUED, ProbeJob.priority != to, Probe.priority.is_(None), near)
        .order_by(ProbeJob.id)
        .limit(limit)
    )
