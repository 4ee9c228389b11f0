"""Leases: claim a job, extend it by heartbeats, give it back. All times are the database's."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from sqlalchemy import ColumnElement, and_, or_, select, true, update
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from foreshock.api import leases, records
from foreshock.probe_kinds import DOCTOR_SECONDS
from foreshock_service.platform.context import ServiceContext
from foreshock_service.platform.database.engine import database_now_us
from foreshock_service.platform.database.tables import Lease, Probe, ProbeJob, Run, Worker, new_identifier
from foreshock_service.platform.problem import ProblemError, stored_file
from foreshock_service.platform.security import Principal
from foreshock_service.replay.probes import jobs as transitions
from foreshock_service.replay.probes import pinned_rollouts, schemas, service, workers
from foreshock_service.replay.probes.environments import WantedEnvironment
from foreshock_service.runs.failing_runs import RunIsolated
from foreshock_service.runs.runs import get_run

if TYPE_CHECKING:
    from foreshock_service.replay.leases.endpoints import FailBody, HeartbeatBody, LeaseRequest

_EXPIRED_AT_ONCE = 100
_logger = logging.getLogger(__name__)
# Heartbeats per lease duration: two in a row may be lost.
_HEARTBEATS = 3


class LeaseNotFound(ProblemError, status=404, problem_type="lease-not-found"):
    """No lease with this id is visible to this key."""


class LeaseLost(ProblemError, status=409, problem_type="lease-lost"):
    """The lease no longer holds its job: another try has begun, or the job has ended. Its scores do not count."""


def is_work_waiting(context: ServiceContext, principal: Principal, request: LeaseRequest) -> bool:
    """Return whether a claim may succeed: a fitting job is queued, or a lease is past its end."""
    with context.database.read() as session:
        if any_overdue(session, database_now_us(session), _duration_us(context)):
            return True
        return bool(_fitting_jobs(session, principal, request))


def heartbeat(
    session: Session, context: ServiceContext, principal: Principal, lease_id: str, body: HeartbeatBody
) -> int:
    """Extend the lease and return its new end in microseconds. Raises LeaseNotFound, LeaseLost."""
    lease, job, _ = hold(session, principal, lease_id, body.token)
    now, job.doing = database_now_us(session), body.doing
    session.execute(update(Worker).filter_by(project=lease.project, name=lease.worker).values(last_seen_at_us=now))
    return transitions.extend(job, now, _duration_us(context))


def write_job_rollouts(context: ServiceContext, principal: Principal, lease_id: str, token: int) -> Path:
    """Write the job's rollouts to a temporary file, which the caller removes. Raises LeaseNotFound, LeaseLost."""
    with context.database.read() as session:
        lease, job, probe = find_lease(session, principal, lease_id)
        check_held(lease, job, token)
        pinned = service.rollouts_of_probe(context, session, probe)
    target = context.store.temporary_file()
    try:
        with stored_file(f"a shard of step {probe.step}"):
            context.decoders.run(pinned_rollouts.write_rollouts, pinned, target)
    except BaseException:
        target.unlink(missing_ok=True)
        raise
    return target


def hold(session: Session, principal: Principal, lease_id: str, token: int) -> tuple[Lease, ProbeJob, Probe]:
    """Return the lease with its job, locked, and its probe. Raises LeaseNotFound, RunDeleted, LeaseLost."""
    lease, job, probe = lock_lease(session, principal, lease_id)
    check_held(lease, job, token)
    return lease, job, probe


def lock_lease(session: Session, principal: Principal, lease_id: str) -> tuple[Lease, ProbeJob, Probe]:
    """Return the lease with its locked job, both read again, and its probe. Raises LeaseNotFound, RunDeleted."""
    lease, job, probe = find_lease(session, principal, lease_id)
    session.refresh(job, with_for_update=True)
    # The lease may have ended while this transaction waited for the job.
    session.refresh(lease)
    return lease, job, probe


def find_lease(session: Session, principal: Principal, lease_id: str) -> tuple[Lease, ProbeJob, Probe]:
    """Return the lease with its job and probe. Raises LeaseNotFound, RunDeleted."""
    found = _find(session, lease_id)
    if found is None or not principal.sees(found[3].project):
        raise LeaseNotFound(f"there is no lease {lease_id}")
    lease, job, probe, run = found
    get_run(session, principal, run.id)
    return lease, job, probe


def is_completed(lease: Lease, token: int) -> bool:
    """Return whether this try has already completed its job: the request is a repeat, its first answer was lost."""
    return lease.outcome == transitions.Outcome.COMPLETED and lease.token == token


def check_held(lease: Lease, job: ProbeJob, token: int) -> None:
    """Raise LeaseLost unless this lease, with this token, owns the job."""
    if transitions.holds(job, lease, token):
        return
    why = f"it ended as {lease.outcome!r}" if lease.outcome is not None else "the token is not the newest of its job"
    raise LeaseLost(f"lease {lease.id} does not hold its job: {why}; drop the work and request another job")


def sweep(context: ServiceContext) -> int:
    """Expire leases without heartbeats, skip queued jobs whose checkpoint has expired, and return the jobs changed."""
    with context.database.read() as session:
        now = database_now_us(session)
        due = any_overdue(session, now, _duration_us(context))
        queued = (ProbeJob.state == transitions.JobState.QUEUED, Probe.checkpoint_expires_at_us <= now)
        query = select(Probe.run_id, Probe.id).join(ProbeJob).where(*queued)
        gone = session.execute(query.distinct().limit(_EXPIRED_AT_ONCE)).all()
    changed = context.database.write(lambda session: _expire_overdue(session, context)) if due else 0
    for run_id, probe_id in gone:
        with RunIsolated(context.database, context.events, run_id, "skip a probe whose checkpoint has expired"):
            changed += context.database.write(partial(_skip, probe_id=probe_id))
    return changed


def claim(
    session: Session, context: ServiceContext, principal: Principal, request: LeaseRequest
) -> leases.LeaseRecord | None:
    """Lease the first job, by priority and age, that the worker can do; None if there is none."""
    now = database_now_us(session)
    workers.record_worker(
        session,
        principal.project or "",
        request.worker,
        now,
        accelerator=request.accelerator,
        device_name=request.device_name,
        environments=list(dict.fromkeys(request.environments)),
        scorers=sorted(set(request.scorers)),
        exact_pairs=sorted(set(request.exact_pairs)),
    )
    _expire_overdue(session, context)
    fitting = _fitting_jobs(session, principal, request)
    found = None
    while found is None and fitting:
        job_id = lock_next_job(session, principal.project, request.accelerator, fitting)
        if job_id is None:
            break
        with _job_isolated(session, context, job_id, now):
            job = session.get_one(ProbeJob, job_id, populate_existing=True)
            found = _lease(session, context, principal, request, job, now)
    return found


def _lease(
    session: Session, context: ServiceContext, principal: Principal, request: LeaseRequest, job: ProbeJob, now: int
) -> leases.LeaseRecord:
    environment = WantedEnvironment.stored(job.environments, job.environment_required).best_of(request.environments)
    lease = Lease(
        id=new_identifier("lease"),
        job_id=job.id,
        token=0,
        project=principal.project or "",
        worker=request.worker,
        accelerator=request.accelerator,
        device_name=request.device_name,
    )
    lease.token = transitions.claim(job, lease.id, request.worker, now, _duration_us(context), environment)
    session.add(lease)
    session.flush()
    probe = session.get_one(Probe, job.probe_id)
    return _read(context, lease, job, probe, get_run(session, principal, probe.run_id))


def _fitting_jobs(session: Session, principal: Principal, request: LeaseRequest) -> list[JobKind]:
    """Return the kinds of queued jobs that the worker can do."""
    # Distinct kinds are few, however many jobs are queued.
    query = select(*_KIND).join(Probe).join(Run, Run.id == Probe.run_id).distinct()
    rows = session.execute(query.where(_offered(principal.project, request.accelerator)))
    offered = {*request.scorers, *request.exact_pairs}
    return [
        kind
        for kind in (JobKind(*row) for row in rows)
        if set(kind.needs.split(",")) <= offered
        and WantedEnvironment.stored(kind.environments, kind.environment_required).accepts(request.environments)
    ]


def _expire_overdue(session: Session, context: ServiceContext) -> int:
    """Expire leases that are past their end, and return their number; jobs locked elsewhere are skipped."""
    now, settings = database_now_us(session), context.settings
    query = select(ProbeJob.id).where(_overdue(now, _duration_us(context))).order_by(ProbeJob.id)
    overdue = session.scalars(query.limit(_EXPIRED_AT_ONCE).with_for_update(skip_locked=True)).all()
    for job_id in overdue:
        with _job_isolated(session, context, job_id, now):
            job = session.get_one(ProbeJob, job_id, populate_existing=True)
            lease = session.get_one(Lease, job.lease_id)
            reason = f"lease expired: no heartbeat for {settings.lease_seconds:g} s"
            transitions.give_back(job, lease, transitions.Outcome.EXPIRED, reason, now, settings.probe_tries)
    session.flush()
    return len(overdue)


@contextmanager
def _job_isolated(session: Session, context: ServiceContext, job_id: str, now_us: int) -> Iterator[None]:
    """Undo the block and fail the job if it cannot be read, so that it keeps no other job from the workers."""
    try:
        with session.begin_nested():
            yield
    except (SQLAlchemyError, ProblemError):
        raise
    except Exception as error:
        _logger.exception("the job %s cannot be read", job_id)
        ended = {"state": transitions.JobState.FAILED, "lease_id": None, "lease_expires_at_us": None}
        why = {"reason": f"it cannot be read: {type(error).__name__}", "finished_at_us": now_us}
        session.execute(update(ProbeJob).where(ProbeJob.id == job_id).values(ended | why))
        run_id = session.scalar(select(Probe.run_id).join(ProbeJob).where(ProbeJob.id == job_id))
        context.unreadable_runs.setdefault(str(run_id), ("give a job of its probe to a worker", error))


def fail(session: Session, context: ServiceContext, principal: Principal, lease_id: str, body: FailBody) -> None:
    """Record why the worker did not do the job. Raises LeaseNotFound, LeaseLost."""
    lease, job, probe = find_lease(session, principal, lease_id)
    jobs = service.lock_jobs(session, probe.id)
    session.refresh(lease)
    if lease.outcome == body.kind and lease.token == body.token:
        return  # A repeated request: the first answer was lost.
    check_held(lease, job, body.token)
    now = database_now_us(session)
    outcome = transitions.Outcome(body.kind)
    if outcome is transitions.Outcome.RETRY:
        transitions.give_back(job, lease, outcome, body.reason, now, context.settings.probe_tries)
        return
    transitions.end(job, lease, outcome, body.reason, now)
    service.end_jobs(session, jobs, f"the probe has ended: {body.reason}", transitions.JobState(job.state))


def _skip(session: Session, probe_id: str) -> int:
    # Only queued jobs end: a worker that has begun may already have loaded the weights.
    queued = [job for job in service.lock_jobs(session, probe_id) if job.state == transitions.JobState.QUEUED]
    return len(service.end_jobs(session, queued, "the probe has ended: its checkpoint has expired"))


def _duration_us(context: ServiceContext) -> int:
    return int(context.settings.lease_seconds * 1e6)


def _read(context: ServiceContext, lease: Lease, job: ProbeJob, probe: Probe, run: Run) -> leases.LeaseRecord:
    assert job.lease_expires_at_us is not None
    asked = {each["scorer"] for each in job.scorers} | schemas.scorers_of_pairs(job.exact_pairs)
    weights = [records.parse(leases.JobWeightsRecord, each) for each in (probe.checkpoint, *(probe.candidates or ()))]
    return leases.LeaseRecord(
        lease=lease.id,
        token=lease.token,
        expires_at_us=job.lease_expires_at_us,
        heartbeat_seconds=context.settings.lease_seconds / _HEARTBEATS,
        job=records.from_attributes(
            leases.LeasedJobRecord,
            job,
            probe=probe.id,
            run=run.id,
            project=run.project,
            attempt=probe.attempt,
            step=probe.step,
            kind=probe.kind,
            options={name: options for name, options in probe.options.items() if name in asked},
            checkpoint=weights[0],
            candidates=tuple(weights[1:]),
            budget_seconds=probe.budget_seconds or DOCTOR_SECONDS,
            wants_vocabulary=run.vocabulary is None,
            rollouts=leases.JobRolloutsRecord(
                count=probe.rollouts, tokens=probe.tokens, digest=probe.rollout_set_digest
            ),
        ),
    )


_DURATIONS_AHEAD = 10
"""Most durations that a lease may end in the future. It is granted for one; the rest allows for a setting that was
shortened and for small corrections of the clock."""

_KIND = (ProbeJob.needs, ProbeJob.accelerator, ProbeJob.environments, ProbeJob.environment_required)


class JobKind(NamedTuple):
    """Requirements of a job on its worker: scorers, accelerator and environments."""

    needs: str
    accelerator: str | None
    environments: str
    environment_required: bool


def _find(session: Session, lease_id: str) -> tuple[Lease, ProbeJob, Probe, Run] | None:
    """Return the lease with its job, probe and run."""
    query = select(Lease, ProbeJob, Probe, Run).join(ProbeJob, ProbeJob.id == Lease.job_id).join(Probe)
    row = session.execute(query.join(Run, Run.id == Probe.run_id).where(Lease.id == lease_id)).one_or_none()
    return None if row is None else (row[0], row[1], row[2], row[3])


def lock_next_job(session: Session, project: str | None, accelerator: str, kinds: Collection[JobKind]) -> str | None:
    """Return the id of the first job of one of these kinds, by rank, locked; jobs of other claims are skipped."""
    of_kinds = (
        and_(*(column.is_not_distinct_from(value) for column, value in zip(_KIND, kind, strict=True))) for kind in kinds
    )
    query = (
        select(ProbeJob.id)
        .join(Probe)
        .join(Run, Run.id == Probe.run_id)
        .where(_offered(project, accelerator), or_(*of_kinds))
        .order_by(ProbeJob.rank_us, ProbeJob.id)
        .limit(1)
        .with_for_update(skip_locked=True, of=ProbeJob)
    )
    return session.scalar(query)


def any_overdue(session: Session, now_us: int, duration_us: int) -> bool:
    """Return whether a lease is past its end."""
    return session.scalar(select(ProbeJob.id).where(_overdue(now_us, duration_us)).limit(1)) is not None


def _offered(project: str | None, accelerator: str) -> ColumnElement[bool]:
    return (
        (ProbeJob.state == transitions.JobState.QUEUED)
        & (ProbeJob.accelerator.is_(None) | (ProbeJob.accelerator == accelerator))
        & Run.deleted_at_us.is_(None)
        & (true() if project is None else Run.project == project)
    )


def _overdue(now_us: int, duration_us: int) -> ColumnElement[bool]:
    # A lease that ends later than this was granted before the clock was set back.
    latest_us = now_us + _DURATIONS_AHEAD * duration_us
    ended = (ProbeJob.lease_expires_at_us <= now_us) | (ProbeJob.lease_expires_at_us > latest_us)
    return (ProbeJob.state == transitions.JobState.RUNNING) & ended
