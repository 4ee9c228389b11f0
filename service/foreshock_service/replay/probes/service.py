"""Probes: read them, retry and cancel one, end the jobs whose rollouts were removed."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from sqlalchemy import ColumnElement, or_, select
from sqlalchemy.orm import Session

from foreshock.api.probes import ProbeRecord
from foreshock.api.watch import STANDING
from foreshock.clock import now_us
from foreshock_service.platform import audit, pagination, problem, security
from foreshock_service.platform.context import ServiceContext
from foreshock_service.platform.database.engine import database_now_us
from foreshock_service.platform.database.tables import Alert, Checkpoint, Lease, Probe, ProbeJob, Run, Shard, Worker
from foreshock_service.replay.probes import jobs as transitions
from foreshock_service.replay.probes import schemas, workers
from foreshock_service.replay.probes.pinned_rollouts import PinnedRollouts
from foreshock_service.runs import events, runs
from foreshock_service.runs.attempts import active_ranges, attempts_of_run, in_ranges
from foreshock_service.runs.shards import shards_with_tokens

CANCELLED = "the probe was cancelled"


class ProbeNotFound(problem.ProblemError, status=404, problem_type="probe-not-found"):
    """No probe with this id is visible to this key."""


class ProbeNotPossible(problem.ProblemError, status=422, problem_type="probe-not-possible"):
    """The step has no rollouts, is not closed, or has no checkpoint to score it with."""


class ProbeStillRuns(problem.ProblemError, status=409, problem_type="probe-still-runs"):
    """The probe has not ended; only an ended probe can be retried."""


class ProbeHasEnded(problem.ProblemError, status=409, problem_type="probe-has-ended"):
    """The probe has ended by itself; there is nothing to cancel."""


def rollouts_of_probe(context: ServiceContext, session: Session, probe: Probe) -> PinnedRollouts:
    """Return the rollouts that a probe pinned, for a decoder. Raises TokensPurged."""
    pinned = {selected[0] for selected in probe.selection}
    shards = shards_with_tokens(session, events.StepKey(probe.run_id, probe.attempt, probe.step))
    return pinned_rollouts(context, [each for each in shards if each.shard in pinned], probe.max_rollouts)


def rollouts_of_step(context: ServiceContext, session: Session, key: events.StepKey) -> PinnedRollouts:
    """Return all stored rollouts of a step, for a decoder. Raises TokensPurged."""
    return pinned_rollouts(context, shards_with_tokens(session, key), None)


def read_probe(session: Session, principal: security.Principal, probe_id: str) -> ProbeRecord:
    """Return the probe with its jobs. Raises ProbeNotFound, RunDeleted."""
    probe, run = get_probe(session, principal, probe_id)
    return shown(session, run, probe)


def list_probes(
    session: Session, principal: security.Principal, run_id: str, step: int | None, cursor: str | None, limit: int
) -> pagination.Page[ProbeRecord]:
    """Return one page of a run's probes, newest first. Raises RunNotFound, RunDeleted."""
    runs.get_run(session, principal, run_id)
    at_step = (Probe.step == step,) if step is not None else ()
    return _page(session, (Probe.run_id == run_id, *at_step), cursor, limit)


def list_probes_of_runs(
    session: Session, projects: Sequence[str], kind: str | None, cursor: str | None, limit: int
) -> pagination.Page[ProbeRecord]:
    """Return one page of the probes of all runs, newest first; a run's project must equal all of `projects`."""
    of_runs = (Run.deleted_at_us.is_(None), *(Run.project == project for project in projects))
    of_kind = (Probe.kind == kind,) if kind is not None else ()
    return _page(session, (*of_runs, *of_kind), cursor, limit)


def _page(
    session: Session, conditions: Iterable[ColumnElement[bool]], cursor: str | None, limit: int
) -> pagination.Page[ProbeRecord]:
    query = select(Probe, Run.project).join(Run, Run.id == Probe.run_id).where(*conditions)
    keys = (Probe.created_at_us, Probe.id)
    return pagination.page_of_query(session, query, keys, cursor, limit, partial(_read, session))


def retry_probe(session: Session, principal: security.Principal, probe_id: str) -> ProbeRecord:
    """Queue the failed and skipped jobs of an ended probe again, with all their tries.

    Raises ProbeStillRuns, and ProbeNotPossible or TokensPurged if its rollouts no longer exist.
    """
    probe, run = get_probe(session, principal, probe_id)
    # The run is locked first, as in a purge of the step.
    runs.lock_run(session, principal, run.id)
    jobs = lock_jobs(session, probe_id)
    if not all(transitions.JobState(job.state) in transitions.ENDED for job in jobs):
        raise ProbeStillRuns("the probe has not ended: wait until it is done, failed or skipped")
    key = events.StepKey(probe.run_id, probe.attempt, probe.step)
    if [selected_rollouts(shard) for shard in shards_with_tokens(session, key)] != probe.selection:
        raise ProbeNotPossible("rollouts of its step were purged or arrived since: request a new probe")
    now = database_now_us(session)
    for job in jobs:
        if job.state != transitions.JobState.DONE:
            transitions.requeue(job, now)
    session.flush()
    return shown(session, run, probe)


def lock_jobs(session: Session, probe_id: str) -> list[ProbeJob]:
    """Return the current jobs of a probe, locked until the transaction ends.

    The order is always the same, so that two transactions that end a probe cannot deadlock.
    """
    query = select(ProbeJob).where(ProbeJob.probe_id == probe_id).order_by(ProbeJob.id).with_for_update()
    return list(session.scalars(query.execution_options(populate_existing=True)))


def end_jobs(
    session: Session, jobs: Iterable[ProbeJob], reason: str, state: transitions.JobState = transitions.JobState.SKIPPED
) -> list[ProbeJob]:
    """End the unfinished ones of the locked jobs, fence off their holders, and return the jobs that were ended."""
    unfinished = [job for job in jobs if transitions.JobState(job.state) not in transitions.ENDED]
    held = [job.lease_id for job in unfinished if job.lease_id is not None]
    leases = {lease.id: lease for lease in session.scalars(select(Lease).where(Lease.id.in_(held)))} if held else {}
    now = database_now_us(session)
    for job in unfinished:
        transitions.cancel(job, leases.get(job.lease_id or ""), state, reason, now)
    session.flush()
    return unfinished


def get_probe(session: Session, principal: security.Principal, probe_id: str) -> tuple[Probe, Run]:
    """Return the probe and its run. Raises ProbeNotFound, RunDeleted."""
    probe = session.get(Probe, probe_id)
    run = runs.find_run(session, probe.run_id) if probe is not None else None
    if probe is None or run is None or not principal.sees(run.project):
        raise ProbeNotFound(f"there is no probe {probe_id}")
    return probe, runs.get_run(session, principal, probe.run_id)


def shown(session: Session, run: Run, probe: Probe) -> ProbeRecord:
    """Return the probe as it is shown."""
    return _read(session, [(probe, run.project)])[0]


def selected_rollouts(shard: Shard) -> list[Any]:
    """Return values that identify the rollouts of a shard."""
    return [shard.shard, shard.digest]


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


def _read(session: Session, probes: Sequence[Any]) -> list[ProbeRecord]:
    """Return the probes, each with the project of its run, as they are shown."""
    jobs = jobs_of(session, [probe.id for probe, _ in probes])
    live: dict[str, Sequence[Worker]] = {}
    waiting: dict[str, str | None] = {}
    for probe, project in probes:
        for job in jobs[probe.id]:
            if job.state == transitions.JobState.QUEUED:
                if project not in live:
                    live[project] = workers.live_workers(session, project, database_now_us(session))
                waiting[job.id] = transitions.waiting_reason(job, live[project])
    return [schemas.probe_record(probe, jobs[probe.id], waiting) for probe, _ in probes]


def cancel_probe(session: Session, principal: security.Principal, probe_id: str) -> ProbeRecord:
    """Skip the unfinished jobs of a probe and fence off their workers; an already cancelled probe is left unchanged.

    Raises ProbeNotFound, RunDeleted, ProbeHasEnded.
    """
    probe, run = get_probe(session, principal, probe_id)
    jobs = lock_jobs(session, probe_id)
    state, _ = transitions.state_of_probe(jobs)
    cancelled = end_jobs(session, jobs, CANCELLED)
    if cancelled:
        audit.record(
            session, principal, "probe.cancel", probe.id, project=run.project, run_id=run.id,
            before={"state": state.value}, after={"step": probe.step, "jobs": len(cancelled)},
        )  # fmt: skip
    elif not any(job.reason == CANCELLED for job in jobs):
        raise ProbeHasEnded(f"the probe has ended as {state.value}: only a queued or running one can be cancelled")
    return shown(session, run, probe)


def cancel_jobs_of_run(session: Session, removed: events.RunRemoved) -> None:
    """Skip the unfinished jobs of a deleted run."""
    query = select(ProbeJob).join(Probe, Probe.id == ProbeJob.probe_id).where(Probe.run_id == removed.run_id)
    query = query.where(ProbeJob.state.not_in(sorted(transitions.ENDED))).order_by(ProbeJob.id)
    end_jobs(session, session.scalars(query.with_for_update(of=ProbeJob)).all(), "the run was deleted")


def find_by_request(session: Session, run_id: str, request_digest: str) -> Probe | None:
    """Return the probe of an equal request."""
    return session.scalar(select(Probe).where(Probe.run_id == run_id, Probe.request_digest == request_digest))


def jobs_of(session: Session, probe_ids: Iterable[str]) -> dict[str, list[ProbeJob]]:
    """Return the jobs of each probe, ordered by engine."""
    query = select(ProbeJob).where(ProbeJob.probe_id.in_(list(probe_ids))).order_by(ProbeJob.engine)
    jobs: dict[str, list[ProbeJob]] = defaultdict(list)
    for job in session.scalars(query):
        jobs[job.probe_id].append(job)
    return jobs


def earlier_checkpoints(session: Session, key: events.StepKey) -> Sequence[Checkpoint]:
    """Return the unexpired checkpoints of the steps before `key.step` from which it was trained, by step."""
    attempts = attempts_of_run(session, key.run_id)
    place = next(place for place, each in enumerate(attempts) if each.attempt == key.attempt)
    chosen = in_ranges(active_ranges(attempts[: place + 1], 0, key.step - 1), Checkpoint)
    left = or_(Checkpoint.expires_at_us.is_(None), Checkpoint.expires_at_us > now_us())
    query = select(Checkpoint).where(Checkpoint.run_id == key.run_id, chosen, left)
    return session.scalars(query.order_by(Checkpoint.step)).all()


def find_checkpoint(session: Session, run_id: str, attempt: int, step: int) -> Checkpoint | None:
    """Return the checkpoint that was announced for a step."""
    return session.get(Checkpoint, (run_id, attempt, step))


ALERT_WINDOW_STEPS = 10
"""Steps at most this far from an alert's own step are near it. In an alarm, weights are wanted every ten steps."""


def is_near_open_alert(run_id: Any, step: Any) -> ColumnElement[bool]:
    """Return the condition that a step is near an open or acknowledged alert of its run. Takes values or columns."""
    near = Alert.step.between(step - ALERT_WINDOW_STEPS, step + ALERT_WINDOW_STEPS)
    of_run = (Alert.run_id == run_id, Alert.state.in_(STANDING))
    return select(Alert.id).where(*of_run, near).exists()
