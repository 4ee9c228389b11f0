"""Leases: claim a job, keep it by heartbeats, hand it back. All times are the database's."""

from __future__ import annotations

from functools import partial

from sqlalchemy.orm import Session

from service.platform.context import ServiceContext
from service.platform.database.dialect import database_now_us
from service.platform.database.tables.probes import Lease, Probe, ProbeJob, Worker
from service.platform.identifiers import new_identifier
from service.platform.problem import ProblemError
from service.platform.security import Principal
from service.replay.leases import repository, transitions
from service.replay.leases.schemas import CheckpointRead, FailBody, LeasedJob, LeaseRead, LeaseRequest, RolloutsRead
from service.replay.leases.transitions import ENDED, JobState, Outcome
from service.replay.probes import repository as probes
from service.replay.probes.schemas import ScorerRequest
from service.runs.runs.service import get_run

_EXPIRED_AT_ONCE = 100
# So many heartbeats fit into a lease: two may be lost.
_HEARTBEATS = 3


class LeaseNotFound(ProblemError):
    """No lease with this id is visible to this key."""

    status = 404


class LeaseLost(ProblemError):
    """The job is not this worker's any more: another try has begun, or it has ended. Nothing it sends counts."""

    status = 409


def claim(context: ServiceContext, principal: Principal, request: LeaseRequest) -> LeaseRead | None:
    """The job that waits longest of those that the worker can do, under a new lease; None where there is none."""
    return context.database.write(lambda session: _claim(session, context, principal, request))


def is_work_waiting(context: ServiceContext, principal: Principal, request: LeaseRequest) -> bool:
    """Whether a claim is worth a transaction: a fitting job waits, or a lease has ended without a word."""
    with context.database.read() as session:
        if repository.any_overdue(session, database_now_us(session)):
            return True
        return bool(_fitting_needs(session, principal, request))


def heartbeat(context: ServiceContext, principal: Principal, lease_id: str, token: int) -> int:
    """The lease's new end in microseconds; raises LeaseLost unless the token is the newest."""

    def work(session: Session) -> int:
        lease, job, _ = hold(session, principal, lease_id, token)
        now = database_now_us(session)
        repository.touch_worker(session, lease.project, lease.worker, now)
        return transitions.extend(job, now, _duration_us(context))

    return context.database.write(work)


def fail(context: ServiceContext, principal: Principal, lease_id: str, body: FailBody) -> None:
    """The worker says why it did not do the job; raises LeaseLost unless the token is the newest."""
    context.database.write(lambda session: _fail(session, context, principal, lease_id, body))


def hold(session: Session, principal: Principal, lease_id: str, token: int) -> tuple[Lease, ProbeJob, Probe]:
    """The lease with its job, locked, and its probe; raises LeaseNotFound, and LeaseLost unless it holds the job."""
    lease, job, probe = find_lease(session, principal, lease_id)
    repository.lock_job(session, job.id)
    check_held(lease, job, token)
    return lease, job, probe


def find_lease(session: Session, principal: Principal, lease_id: str) -> tuple[Lease, ProbeJob, Probe]:
    """The lease, its job and its probe as they are; raises LeaseNotFound, RunDeleted."""
    found = repository.find(session, lease_id)
    if found is None or not principal.sees(probes.run_of(session, found[2]).project):
        raise LeaseNotFound(f"there is no lease {lease_id}")
    get_run(session, principal, found[2].run_id)
    return found


def check_held(lease: Lease, job: ProbeJob, token: int) -> None:
    """Raise LeaseLost unless this lease, with this token, owns the job."""
    if transitions.holds(job, lease, token):
        return
    why = f"it ended as {lease.outcome!r}" if lease.outcome is not None else "the token is not the newest of its job"
    raise LeaseLost(f"the lease {lease.id} does not hold its job: {why}; drop the work and ask for another job")


def sweep(context: ServiceContext) -> int:
    """End the leases that were not heard of, and skip what waits for expired checkpoints; how many jobs changed."""
    with context.database.read() as session:
        now = database_now_us(session)
        due = repository.any_overdue(session, now)
        gone = repository.probes_without_checkpoint(session, now, _EXPIRED_AT_ONCE)
    changed = context.database.write(lambda session: _expire_overdue(session, context)) if due else 0
    return changed + sum(context.database.write(partial(_skip, probe_id=probe_id)) for probe_id in gone)


def _claim(session: Session, context: ServiceContext, principal: Principal, request: LeaseRequest) -> LeaseRead | None:
    now = database_now_us(session)
    repository.note_worker(session, _worker(principal, request, now))
    _expire_overdue(session, context)
    needs = _fitting_needs(session, principal, request)
    job = repository.lock_next_job(session, principal.project, request.accelerator, needs) if needs else None
    if job is None:
        return None
    lease = Lease(
        id=new_identifier("lease"),
        job_id=job.id,
        token=0,
        project=principal.project or "",
        worker=request.worker,
        accelerator=request.accelerator,
        device_name=request.device_name,
        granted_at_us=now,
        ended_at_us=None,
        outcome=None,
        reason=None,
    )
    lease.token = transitions.claim(job, lease.id, request.worker, now, _duration_us(context))
    repository.add_lease(session, lease)
    probe = probes.find(session, job.probe_id)
    assert probe is not None
    return _read(context, lease, job, probe)


def _fitting_needs(session: Session, principal: Principal, request: LeaseRequest) -> list[str]:
    can = set(request.scorers)
    waiting = repository.needs_of_waiting_jobs(session, principal.project, request.accelerator)
    return [needs for needs in waiting if set(needs.split(",")) <= can]


def _expire_overdue(session: Session, context: ServiceContext) -> int:
    now = database_now_us(session)
    overdue = repository.lock_overdue(session, now, _EXPIRED_AT_ONCE)
    for job in overdue:
        transitions.expire(job, repository.lease_of(session, job), now, context.settings.probe_tries)
    session.flush()
    return len(overdue)


def _fail(session: Session, context: ServiceContext, principal: Principal, lease_id: str, body: FailBody) -> None:
    lease, job, probe = find_lease(session, principal, lease_id)
    # All jobs of the probe in one order, so that two that end it cannot wait for each other.
    jobs = probes.lock_jobs(session, probe.id)
    if lease.outcome == body.kind and lease.token == body.token:
        return  # The answer to the first time was lost.
    check_held(lease, job, body.token)
    now = database_now_us(session)
    outcome = Outcome(body.kind)
    if outcome is Outcome.RETRY:
        transitions.give_back(job, lease, body.reason, now, context.settings.probe_tries)
        return
    transitions.end(job, lease, outcome, body.reason, now)
    _cancel_rest(session, jobs, JobState(job.state), body.reason, now)


def _cancel_rest(session: Session, jobs: list[ProbeJob], state: JobState, reason: str, now: int) -> int:
    """End what has not ended of a probe that cannot be done; how many jobs."""
    leases = probes.leases_of(session, jobs)
    rest = [job for job in jobs if JobState(job.state) not in ENDED]
    for job in rest:
        transitions.cancel(job, leases.get(job.id), state, f"the probe has ended: {reason}", now)
    return len(rest)


def _skip(session: Session, probe_id: str) -> int:
    jobs = probes.lock_jobs(session, probe_id)
    if not any(job.state == JobState.QUEUED for job in jobs):
        return 0
    # A worker that has begun may still hold the weights: let it finish.
    waiting = [job for job in jobs if job.state == JobState.QUEUED]
    return _cancel_rest(session, waiting, JobState.SKIPPED, "its checkpoint has expired", database_now_us(session))


def _worker(principal: Principal, request: LeaseRequest, now: int) -> Worker:
    return Worker(
        project=principal.project or "",
        name=request.worker,
        accelerator=request.accelerator,
        device_name=request.device_name,
        scorers=sorted(set(request.scorers)),
        first_seen_at_us=now,
        last_seen_at_us=now,
    )


def _duration_us(context: ServiceContext) -> int:
    return int(context.settings.lease_seconds * 1e6)


def _read(context: ServiceContext, lease: Lease, job: ProbeJob, probe: Probe) -> LeaseRead:
    assert job.lease_expires_at_us is not None
    asked = {each["scorer"] for each in job.scorers}
    return LeaseRead(
        lease=lease.id,
        token=lease.token,
        expires_at_us=job.lease_expires_at_us,
        heartbeat_seconds=context.settings.lease_seconds / _HEARTBEATS,
        job=LeasedJob(
            id=job.id,
            probe=probe.id,
            run=probe.run_id,
            attempt=probe.attempt,
            step=probe.step,
            kind=probe.kind,
            scorers=[ScorerRequest(**each) for each in job.scorers],
            options={name: options for name, options in probe.options.items() if name in asked},
            checkpoint=CheckpointRead(**probe.checkpoint),
            rollouts=RolloutsRead(count=probe.rollouts, tokens=probe.tokens, digest=probe.rollout_set_digest),
        ),
    )
