"""Leases: a worker claims a job, keeps it by heartbeats, fetches its rollouts, and gives it back if it fails.

The requests that send results and complete the job are in `foreshock_service.replay.results`. All times are the
database's.
"""

import asyncio
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal

from fastapi import Depends, Header, Path, Request, Response, status
from fastapi.responses import FileResponse
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints
from sqlalchemy import ColumnElement, select, true, update
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session
from starlette.concurrency import run_in_threadpool

from foreshock.api import leases, records
from foreshock.probe_kinds import DOCTOR_SECONDS
from foreshock_service.platform import columnar, parameters, security
from foreshock_service.platform.context import Context, ServiceContext
from foreshock_service.platform.database.engine import database_now_us
from foreshock_service.platform.database.tables import Lease, Probe, ProbeJob, Run, Worker, new_identifier
from foreshock_service.platform.problem import ProblemError, stored_file
from foreshock_service.replay import files
from foreshock_service.replay.probes import jobs as transitions
from foreshock_service.replay.probes import schemas, service, workers
from foreshock_service.replay.probes.environments import WantedEnvironment
from foreshock_service.runs.failing_runs import RunIsolated
from foreshock_service.runs.runs import get_run

router = parameters.api_router(prefix="/v1/leases", tags=["leases"])
LeaseIdentifier = Annotated[str, Path(max_length=100, pattern=r"^[A-Za-z0-9_]+$")]

_EXPIRED_AT_ONCE = 100
# Interval in seconds at which a waiting request looks for work.
_POLL_SECONDS = 0.5
# Heartbeats per lease duration: two in a row may be lost.
_HEARTBEATS = 3
# Most durations that a lease may end in the future. It is granted for one; the rest allows for a setting that was
# shortened and for small corrections of the clock.
_DURATIONS_AHEAD = 10
_logger = logging.getLogger(__name__)


class LeaseNotFound(ProblemError, status=404, problem_type="lease-not-found"):
    """No lease with this id is visible to this key."""


class LeaseLost(ProblemError, status=409, problem_type="lease-lost"):
    """The lease no longer holds its job: another try has begun, or the job has ended. Its scores do not count."""


@dataclass(frozen=True, slots=True)
class AskedLease:
    """The lease that a worker's request names, with the fencing token that the worker has."""

    context: ServiceContext
    principal: security.Principal
    lease: str
    token: int

    def find(self, session: Session, *, lock: bool = False) -> tuple[Lease, ProbeJob, Probe]:
        """Return the lease with its job and probe; `lock`: the job is locked. Raises LeaseNotFound, RunDeleted."""
        query = select(Lease, ProbeJob, Probe, Run).join(ProbeJob, ProbeJob.id == Lease.job_id).join(Probe)
        found = session.execute(query.join(Run, Run.id == Probe.run_id).where(Lease.id == self.lease)).one_or_none()
        if found is None or not self.principal.sees(found[3].project):
            raise LeaseNotFound(f"there is no lease {self.lease}")
        lease, job, probe, run = found
        get_run(session, self.principal, run.id)
        if lock:
            session.refresh(job, with_for_update=True)
            # The lease may have ended while this transaction waited for the job.
            session.refresh(lease)
        return lease, job, probe

    def hold(self, session: Session, *, lock: bool = True) -> tuple[Lease, ProbeJob, Probe]:
        """Return what `find` does; raises LeaseLost unless this lease, with this token, owns the job."""
        found = self.find(session, lock=lock)
        self.check_held(*found[:2])
        return found

    def check_held(self, lease: Lease, job: ProbeJob) -> None:
        """Raise LeaseLost unless the lease owns the job."""
        # One past its end owns it until a sweep or a claim expires it: a late heartbeat alone discards no work.
        is_leased = job.state == transitions.JobState.RUNNING and job.lease_id == lease.id
        if not (is_leased and job.fencing_token == lease.token == self.token):
            ended = lease.outcome is not None
            why = f"it ended as {lease.outcome!r}" if ended else "the token is not the newest of its job"
            raise LeaseLost(f"lease {lease.id} does not hold its job: {why}; drop the work and request another job")

    def has_completed(self, lease: Lease) -> bool:
        """Return whether this try has already completed its job: the request is a repeat, its first answer was lost."""
        return lease.outcome == transitions.Outcome.COMPLETED and lease.token == self.token


async def _asked_lease(
    lease: LeaseIdentifier,
    token: Annotated[int, Header(alias="X-Foreshock-Lease-Token", ge=1, lt=2**63)],
    context: Context,
    principal: security.Worker,
) -> AskedLease:
    return AskedLease(context, principal, lease, token)


LeaseOfRequest = Annotated[AskedLease, Depends(_asked_lease)]


def _storable(text: str) -> str:
    """Replace NUL characters: a reason is often a traceback, and PostgreSQL stores no NUL in text."""
    return text.replace("\x00", "�")


class LeaseRequest(BaseModel):
    """A worker's request for a job that it can do."""

    worker: parameters.Name = Field(description="unique name of the worker")
    accelerator: schemas.Accelerator = "cpu"
    device_name: Annotated[str, StringConstraints(max_length=200, pattern=r"^[^\x00-\x1f\x7f]*$")] = ""
    environments: list[schemas.EnvironmentName] = Field(
        default_factory=list, max_length=64, description="the environments that the worker can score in"
    )
    scorers: list[schemas.ScorerName] = Field(
        min_length=1, max_length=64, description="all scorers that the worker offers"
    )
    exact_pairs: list[schemas.PairKey] = Field(
        default=[], max_length=64, description="all exact pairs that the worker offers"
    )
    wait: float = Field(default=0.0, ge=0, le=60, description="seconds to wait if there is no job")


class TokenBody(BaseModel):
    """The lease's fencing token."""

    model_config = ConfigDict(extra="forbid")

    token: int = Field(ge=1, lt=2**63)


class HeartbeatBody(TokenBody):
    """A sign of life."""

    doing: Annotated[str, Field(max_length=300), AfterValidator(_storable)] = Field(
        default="", description="what the job is trying at the moment"
    )


class FailBody(TokenBody):
    """The reason of a failed try. retry: another try may succeed; final: none can; skipped: the weights are gone."""

    reason: Annotated[str, Field(min_length=1, max_length=20_000), AfterValidator(_storable)]
    kind: Literal["retry", "final", "skipped"]


class HeartbeatRead(BaseModel):
    """The new end of the lease."""

    expires_at_us: int


class UploadReceipt(BaseModel):
    """A receipt: the uploaded values are `stored` now, or a `duplicate` of bytes that were stored before."""

    status: Literal["stored", "duplicate"]
    digest: str = Field(description="digest of the body's bytes: `sha256:…`")
    rollouts: int
    tokens: int = Field(description="response tokens")


@router.post(
    "", response_model=leases.LeaseRecord, responses={204: {"description": "No job is queued that this worker can do"}}
)
async def request_lease(
    body: LeaseRequest, request: Request, context: Context, principal: security.Worker
) -> leases.LeaseRecord | Response:
    """Lease the longest-queued job that this worker can do; waits up to `wait` seconds for one."""
    deadline = time.monotonic() + body.wait
    claim = partial(context.database.write, partial(claim_job, context=context, principal=principal, request=body))
    lease = await run_in_threadpool(claim)
    while lease is None:
        left = deadline - time.monotonic()
        if left <= 0 or context.stopping.is_set() or await request.is_disconnected():
            return Response(status_code=status.HTTP_204_NO_CONTENT)
        # While it sleeps, a request holds neither a thread nor a connection.
        await asyncio.sleep(min(_POLL_SECONDS, left))
        if await run_in_threadpool(_is_work_waiting, context, principal, body):
            lease = await run_in_threadpool(claim)
    return lease


def _is_work_waiting(context: ServiceContext, principal: security.Principal, request: LeaseRequest) -> bool:
    """Return whether a claim may succeed: a fitting job is queued, as expired ones are by the next sweep."""
    with context.database.read() as session:
        return any(_fitting_jobs(session, principal, request))


def claim_job(
    session: Session, context: ServiceContext, principal: security.Principal, request: LeaseRequest
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
    for job_id in list(_fitting_jobs(session, principal, request)):
        # A job that another claim has locked or leased meanwhile is skipped.
        query = select(ProbeJob).where(ProbeJob.id == job_id, ProbeJob.state == transitions.JobState.QUEUED)
        query = query.with_for_update(skip_locked=True).execution_options(populate_existing=True)
        with _job_isolated(session, context, job_id, now):
            job = session.scalar(query)
            if job is not None:
                return _lease(session, context, principal, request, job, now)
    return None


def _fitting_jobs(session: Session, principal: security.Principal, request: LeaseRequest) -> Iterator[str]:
    """Yield the ids of the queued jobs that the worker can do, in the order of the queue."""
    query = select(ProbeJob.id, ProbeJob.needs, ProbeJob.environments, ProbeJob.environment_required)
    query = query.join(Probe).join(Run, Run.id == Probe.run_id).order_by(ProbeJob.rank_us, ProbeJob.id)
    queued = query.where(
        ProbeJob.state == transitions.JobState.QUEUED,
        ProbeJob.accelerator.is_(None) | (ProbeJob.accelerator == request.accelerator),
        Run.deleted_at_us.is_(None),
        true() if principal.project is None else Run.project == principal.project,
    )
    offered = {*request.scorers, *request.exact_pairs}
    for job_id, needs, names, is_required in session.execute(queued):
        if offered.issuperset(needs) and WantedEnvironment(names, is_required).accepts(request.environments):
            yield job_id


def _lease(
    session: Session,
    context: ServiceContext,
    principal: security.Principal,
    request: LeaseRequest,
    job: ProbeJob,
    now_us: int,
) -> leases.LeaseRecord:
    environment = WantedEnvironment(job.environments, job.environment_required).best_of(request.environments)
    offered = request.model_dump(include={"worker", "accelerator", "device_name"})
    lease = Lease(id=new_identifier("lease"), job_id=job.id, project=principal.project or "", **offered)
    ends_at_us = now_us + _duration_us(context)
    transitions.claim(job, lease, ends_at_us, environment)
    session.add(lease)
    session.flush()
    probe = session.get_one(Probe, job.probe_id)
    run = get_run(session, principal, probe.run_id)
    asked = {each["scorer"] for each in job.scorers} | schemas.scorers_of_pairs(job.exact_pairs)
    checkpoint, *candidates = (
        records.parse(leases.JobWeightsRecord, each) for each in (probe.checkpoint, *(probe.candidates or ()))
    )
    return leases.LeaseRecord(
        lease=lease.id,
        token=lease.token,
        expires_at_us=ends_at_us,
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
            checkpoint=checkpoint,
            candidates=tuple(candidates),
            budget_seconds=probe.budget_seconds or DOCTOR_SECONDS,
            wants_vocabulary=run.vocabulary is None,
            rollouts=leases.JobRolloutsRecord(
                count=probe.rollouts, tokens=probe.tokens, digest=probe.rollout_set_digest
            ),
        ),
    )


@router.post("/{lease}/heartbeat")
def heartbeat(
    lease: LeaseIdentifier, body: HeartbeatBody, context: Context, principal: security.Worker
) -> HeartbeatRead:
    """Extend the lease; 409 `lease-lost` means that another try has the job or the job has ended."""
    asked = AskedLease(context, principal, lease, body.token)
    ends = context.database.write(lambda session: extend_lease(session, asked, body.doing))
    return HeartbeatRead(expires_at_us=ends)


def extend_lease(session: Session, asked: AskedLease, doing: str = "") -> int:
    """Extend the lease and return its new end in microseconds. Raises LeaseNotFound, LeaseLost."""
    lease, job, _ = asked.hold(session)
    now, job.doing = database_now_us(session), doing
    session.execute(update(Worker).filter_by(project=lease.project, name=lease.worker).values(last_seen_at_us=now))
    # Never earlier than the old end.
    job.lease_expires_at_us = max(job.lease_expires_at_us or 0, now + _duration_us(asked.context))
    return job.lease_expires_at_us


@router.get("/{lease}/rollouts", response_class=FileResponse, responses=columnar.PARQUET_FILE)
def read_rollouts(asked: LeaseOfRequest) -> FileResponse:
    """Return the job's rollouts as Parquet."""
    context = asked.context
    with context.database.read() as session:
        _, _, probe = asked.hold(session, lock=False)
        pinned = service.rollouts_of_probe(context, session, probe)
    with stored_file(f"a shard of step {probe.step}"):
        return columnar.parquet_file(
            context.store, lambda path: context.decoders.run(files.write_rollouts, pinned, path)
        )


@router.post("/{lease}/fail", status_code=status.HTTP_204_NO_CONTENT)
def fail(lease: LeaseIdentifier, body: FailBody, context: Context, principal: security.Worker) -> None:
    """Report that the try failed. retry: the job is queued again or given up; final, skipped: the probe ends."""
    asked = AskedLease(context, principal, lease, body.token)
    context.database.write(lambda session: fail_job(session, asked, body))


def fail_job(session: Session, asked: AskedLease, body: FailBody) -> None:
    """Record why the worker did not do the job. Raises LeaseNotFound, LeaseLost."""
    lease, job, probe = asked.find(session)
    jobs = service.lock_jobs(session, probe.id)
    session.refresh(lease)
    if lease.outcome == body.kind and lease.token == body.token:
        return  # A repeated request: the first answer was lost.
    asked.check_held(lease, job)
    now, tries = database_now_us(session), asked.context.settings.probe_tries
    transitions.fail(job, lease, transitions.Outcome(body.kind), body.reason, now, tries)
    if body.kind != "retry":
        service.end_jobs(session, jobs, f"the probe has ended: {body.reason}", transitions.JobState(job.state))


def sweep(context: ServiceContext) -> int:
    """Expire leases without heartbeats, skip queued jobs whose checkpoint has expired, and return the jobs changed."""
    with context.database.read() as session:
        now = database_now_us(session)
        due = session.scalar(select(ProbeJob.id).where(_overdue(now, context)).limit(1)) is not None
        queued = (ProbeJob.state == transitions.JobState.QUEUED, Probe.checkpoint_expires_at_us <= now)
        query = select(Probe.run_id, Probe.id).join(ProbeJob).where(*queued)
        gone = session.execute(query.distinct().limit(_EXPIRED_AT_ONCE)).all()
    changed = context.database.write(lambda session: _expire_overdue(session, context)) if due else 0
    for run_id, probe_id in gone:
        with RunIsolated(context.database, context.events, run_id, "skip a probe whose checkpoint has expired"):
            changed += context.database.write(partial(_skip, probe_id=probe_id))
    return changed


def _skip(session: Session, probe_id: str) -> int:
    # Only queued jobs end: a worker that has begun may already have loaded the weights.
    queued = [job for job in service.lock_jobs(session, probe_id) if job.state == transitions.JobState.QUEUED]
    return len(service.end_jobs(session, queued, "the probe has ended: its checkpoint has expired"))


def _expire_overdue(session: Session, context: ServiceContext) -> int:
    """Expire leases that are past their end, and return their number; jobs locked elsewhere are skipped."""
    now, settings = database_now_us(session), context.settings
    query = select(ProbeJob.id).where(_overdue(now, context)).order_by(ProbeJob.id)
    overdue = session.scalars(query.limit(_EXPIRED_AT_ONCE).with_for_update(skip_locked=True)).all()
    for job_id in overdue:
        with _job_isolated(session, context, job_id, now):
            job = session.get_one(ProbeJob, job_id, populate_existing=True)
            lease = session.get_one(Lease, job.lease_id)
            reason = f"lease expired: no heartbeat for {settings.lease_seconds:g} s"
            transitions.fail(job, lease, transitions.Outcome.EXPIRED, reason, now, settings.probe_tries)
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


def _overdue(now_us: int, context: ServiceContext) -> ColumnElement[bool]:
    # A lease that ends later than this was granted before the clock was set back.
    latest_us = now_us + _DURATIONS_AHEAD * _duration_us(context)
    ended = (ProbeJob.lease_expires_at_us <= now_us) | (ProbeJob.lease_expires_at_us > latest_us)
    return (ProbeJob.state == transitions.JobState.RUNNING) & ended


def _duration_us(context: ServiceContext) -> int:
    return int(context.settings.lease_seconds * 1e6)
