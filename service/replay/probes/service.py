"""Probes: read them, retry and cancel one, set priorities, end the jobs whose rollouts were removed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, cast

from sqlalchemy import ColumnElement, select
from sqlalchemy.orm import Session

from foreshock.api.probes import ProbeRecord
from foreshock_service.platform.audit import record
from foreshock_service.platform.context import ServiceContext
from foreshock_service.platform.database.engine import database_now_us
from foreshock_service.platform.database.tables import Run, Shard
from foreshock_service.platform.database.tables.probes import Lease, Probe, ProbeJob
from foreshock_service.platform.parameters import CursorKey, Page, decode_cursor, page_of
from foreshock_service.platform.problem import ProblemError
from foreshock_service.platform.security import Principal
from foreshock_service.replay.probes import repository
from foreshock_service.replay.probes.job_bundles import waiting_reason
from foreshock_service.replay.probes.jobs import (
    ENDED,
    JobState,
    Priority,
    cancel,
    requeue,
    set_priority,
    state_of_probe,
)
from foreshock_service.replay.probes.pinned_rollouts import PinnedRollouts
from foreshock_service.replay.probes.schemas import probe_record
from foreshock_service.replay.probes.workers import live_workers
from foreshock_service.runs.events import RunRemoved, StepKey
from foreshock_service.runs.runs import find_run, get_run
from foreshock_service.runs.shards import shards_with_tokens

CANCELLED = "the probe was cancelled"
_RAISED_AT_ONCE = 100


class ProbeNotFound(ProblemError):
    """No probe with this id is visible to this key."""

    status = 404
    problem_type = "probe-not-found"


class ProbeNotPossible(ProblemError):
    """The step has no rollouts, is not closed, or has no checkpoint to score it with."""

    status = 422
    problem_type = "probe-not-possible"


class ProbeStillRuns(ProblemError):
    """The probe has not ended; only an ended probe can be retried."""

    status = 409
    problem_type = "probe-still-runs"


class ProbeHasEnded(ProblemError):
    """The probe has ended by itself; there is nothing to cancel."""

    status = 409
    problem_type = "probe-has-ended"


def rollouts_of_probe(context: ServiceContext, session: Session, probe: Probe) -> PinnedRollouts:
    """Return the rollouts that a probe pinned, for a decoder. Raises TokensPurged."""
    pinned = {selected[0] for selected in probe.selection}
    shards = shards_with_tokens(session, StepKey(probe.run_id, probe.attempt, probe.step))
    return pinned_rollouts(context, [each for each in shards if each.shard in pinned], probe.max_rollouts)


def rollouts_of_step(context: ServiceContext, session: Session, key: StepKey) -> PinnedRollouts:
    """Return all stored rollouts of a step, for a decoder. Raises TokensPurged."""
    return pinned_rollouts(context, shards_with_tokens(session, key), None)


def read_probe(session: Session, principal: Principal, probe_id: str) -> ProbeRecord:
    """Return the probe with its jobs. Raises ProbeNotFound, RunDeleted."""
    probe, run = get_probe(session, principal, probe_id)
    return shown(session, run, probe)


def list_probes(
    session: Session, principal: Principal, run_id: str, step: int | None, cursor: str | None, limit: int
) -> Page[ProbeRecord]:
    """Return one page of a run's probes, newest first. Raises RunNotFound, RunDeleted."""
    run = get_run(session, principal, run_id)
    of_step = (Probe.step == step,) if step is not None else ()
    probes = repository.newest(session, (Probe.run_id == run_id, *of_step), _after(cursor), limit + 1)
    return page_of(_read(session, run.project, probes), limit, _key_of)


def list_probes_of_runs(
    session: Session, projects: Sequence[str], kind: str | None, cursor: str | None, limit: int
) -> Page[ProbeRecord]:
    """Return one page of the probes of all runs whose project equals each of `projects`, newest first."""
    of_runs = (Run.deleted_at_us.is_(None), *(Run.project == project for project in projects))
    of_kind = (Probe.kind == kind,) if kind is not None else ()
    probes = repository.newest(session, (*of_runs, *of_kind), _after(cursor), limit + 1)
    of_project: defaultdict[str, list[Probe]] = defaultdict(list)
    for probe in probes:
        run = find_run(session, probe.run_id)
        assert run is not None
        of_project[run.project].append(probe)
    reads = {each.id: each for project, found in of_project.items() for each in _read(session, project, found)}
    return page_of([reads[probe.id] for probe in probes], limit, _key_of)


def retry_probe(session: Session, principal: Principal, probe_id: str) -> ProbeRecord:
    """Queue the failed and skipped jobs of an ended probe again, with all their tries.

    Raises ProbeStillRuns, and ProbeNotPossible or TokensPurged if its rollouts are no longer there.
    """
    probe, run = get_probe(session, principal, probe_id)
    jobs = lock_jobs(session, probe_id)
    if not all(JobState(job.state) in ENDED for job in jobs):
        raise ProbeStillRuns("the probe has not ended: wait until it is done, failed or skipped")
    key = StepKey(probe.run_id, probe.attempt, probe.step)
    if [selected_rollouts(shard) for shard in shards_with_tokens(session, key)] != probe.selection:
        raise ProbeNotPossible("rollouts of its step were deleted or arrived since: request a new probe")
    now = database_now_us(session)
    for job in jobs:
        if job.state != JobState.DONE:
            requeue(job, now)
    session.flush()
    return shown(session, run, probe)


def lock_jobs(session: Session, probe_id: str) -> list[ProbeJob]:
    """Return the current jobs of a probe, locked until the transaction ends.

    Always in the same order, so that two transactions that end a probe cannot wait for each other.
    """
    query = select(ProbeJob).where(ProbeJob.probe_id == probe_id).order_by(ProbeJob.id).with_for_update()
    return list(session.scalars(query.execution_options(populate_existing=True)))


def end_jobs(
    session: Session, jobs: Iterable[ProbeJob], reason: str, state: JobState = JobState.SKIPPED
) -> list[ProbeJob]:
    """End the locked jobs that have not ended, fence their holders off, and return these jobs."""
    unfinished = [job for job in jobs if JobState(job.state) not in ENDED]
    held = [job.lease_id for job in unfinished if job.lease_id is not None]
    leases = {lease.id: lease for lease in session.scalars(select(Lease).where(Lease.id.in_(held)))} if held else {}
    now = database_now_us(session)
    for job in unfinished:
        cancel(job, leases.get(job.lease_id or ""), state, reason, now)
    session.flush()
    return unfinished


def get_probe(session: Session, principal: Principal, probe_id: str) -> tuple[Probe, Run]:
    """Return the probe and its run. Raises ProbeNotFound, RunDeleted."""
    probe = session.get(Probe, probe_id)
    run = find_run(session, probe.run_id) if probe is not None else None
    if probe is None or run is None or not principal.sees(run.project):
        raise ProbeNotFound(f"there is no probe {probe_id}")
    return probe, get_run(session, principal, probe.run_id)


def shown(session: Session, run: Run, probe: Probe) -> ProbeRecord:
    """Return the probe as it is shown."""
    return _read(session, run.project, [probe])[0]


def selected_rollouts(shard: Shard) -> list[Any]:
    """Return what identifies the rollouts of a shard: other ones than before if some were deleted."""
    return [shard.shard, shard.digest] if not shard.deleted_rollouts else [shard.shard, shard.digest, shard.file]


def pinned_rollouts(context: ServiceContext, shards: Sequence[Shard], max_rollouts: int | None) -> PinnedRollouts:
    """Return the rollouts of shards, or a sample of them, for a decoder."""
    samples = tuple(shard.sampled_rollouts for shard in shards)
    return PinnedRollouts(
        files=tuple(context.store.file(shard.file) for shard in shards),
        max_rollouts=max_rollouts,
        samples=samples,
        unstored=sum(
            shard.rollouts - sample for shard, sample in zip(shards, samples, strict=True) if sample is not None
        ),
    )


def _read(session: Session, project: str, probes: Sequence[Probe]) -> list[ProbeRecord]:
    jobs = repository.jobs_of(session, [probe.id for probe in probes])
    queued = [job for of_probe in jobs.values() for job in of_probe if job.state == JobState.QUEUED]
    live = live_workers(session, project, database_now_us(session)) if queued else ()
    waiting = {job.id: waiting_reason(job, live) for job in queued}
    return [probe_record(probe, jobs[probe.id], waiting) for probe in probes]


def _after(cursor: str | None) -> tuple[int, str] | None:
    return cast("tuple[int, str]", decode_cursor(cursor, (int, str))) if cursor is not None else None


def _key_of(probe: ProbeRecord) -> CursorKey:
    return (probe.created_at_us, probe.id)


def change_priority(
    session: Session, principal: Principal, run: Run, probe: Probe, jobs: Iterable[ProbeJob], priority: Priority
) -> None:
    """Set the priority that an equal, later request asks for; running and ended jobs keep their place."""
    before, probe.priority = probe.priority, priority
    for job in jobs:
        if job.state == JobState.QUEUED:
            set_priority(job, priority)
    record(
        session, principal, "probe.priority", probe.id, project=run.project, run_id=run.id,
        before={"priority": before}, after={"priority": priority},
    )  # fmt: skip
    session.flush()


def raise_jobs_near_alerts(context: ServiceContext) -> int:
    """Make queued jobs of steps near an open alert urgent, unless their priority was requested; return their number."""
    with context.database.read() as session:
        if not repository.jobs_to_raise(session, 1):
            return 0
    return context.database.write(_raise)


def _raise(session: Session) -> int:
    jobs = repository.jobs_to_raise(session, _RAISED_AT_ONCE, locked=True)
    for job in jobs:
        set_priority(job, Priority.URGENT)
    session.flush()
    return len(jobs)


def cancel_probe(session: Session, principal: Principal, probe_id: str) -> ProbeRecord:
    """Skip the unfinished jobs of a probe and fence their workers off; a cancelled probe stays as it is.

    Raises ProbeNotFound, RunDeleted, ProbeHasEnded.
    """
    probe, run = get_probe(session, principal, probe_id)
    jobs = lock_jobs(session, probe_id)
    state, _ = state_of_probe(jobs)
    cancelled = end_jobs(session, jobs, CANCELLED)
    if cancelled:
        record(
            session, principal, "probe.cancel", probe.id, project=run.project, run_id=run.id,
            before={"state": state.value}, after={"step": probe.step, "jobs": len(cancelled)},
        )  # fmt: skip
    elif not any(job.reason == CANCELLED for job in jobs):
        raise ProbeHasEnded(f"the probe has ended as {state.value}: only a queued or running one can be cancelled")
    return shown(session, run, probe)


def cancel_jobs_of_run(session: Session, removed: RunRemoved) -> None:
    """Skip the unfinished jobs of a deleted run."""
    _cancel(session, Probe.run_id == removed.run_id, "the run was deleted")


def cancel_jobs_of_step(session: Session, key: StepKey, reason: str) -> None:
    """Skip the unfinished jobs of a step whose tokens are no longer all there."""
    of_step = (Probe.run_id == key.run_id) & (Probe.attempt == key.attempt) & (Probe.step == key.step)
    _cancel(session, of_step, reason)


def _cancel(session: Session, of_probes: ColumnElement[bool], reason: str) -> None:
    query = select(ProbeJob).join(Probe, Probe.id == ProbeJob.probe_id)
    query = query.where(of_probes, ProbeJob.state.not_in(sorted(ENDED))).order_by(ProbeJob.id)
    end_jobs(session, session.scalars(query.with_for_update(of=ProbeJob)).all(), reason)
