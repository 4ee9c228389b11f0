"""Probes: request one, read them, retry and cancel one, end the jobs whose rollouts were removed."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any

from fastapi import Path, Query, Response, status
from sqlalchemy import ColumnElement, or_, select
from sqlalchemy.orm import Session

from foreshock import clock, digests, errors, probe_kinds
from foreshock.api.probes import JobRecord, ProbeRecord
from foreshock.api.records import from_attributes
from foreshock.api.watch import STANDING
from foreshock.scorers import EXACT_PAIRS, VARIANTS, available_scorers
from foreshock_service.platform import audit, pagination, parameters, problem, security
from foreshock_service.platform.context import Context, ServiceContext
from foreshock_service.platform.database.engine import database_now_us, insert_if_absent
from foreshock_service.platform.database.tables import (
    Alert,
    Checkpoint,
    Lease,
    Probe,
    ProbeJob,
    Run,
    Shard,
    new_identifier,
)
from foreshock_service.replay import files
from foreshock_service.replay.probes import environments, schemas, workers
from foreshock_service.replay.probes import jobs as transitions
from foreshock_service.runs import attempts, events, runs
from foreshock_service.runs.shards import PURGED, shards_of_step, shards_with_tokens
from foreshock_service.runs.steps import find_step

router = parameters.api_router(prefix="/v1", tags=["probes"])
ProbeIdentifier = Annotated[str, Path(max_length=100, pattern=r"^[A-Za-z0-9_]+$")]
CANCELLED = "the probe was cancelled"
ALERT_WINDOW_STEPS = 10
"""Steps at most this far from an alert's own step are near it. In an alarm, weights are wanted every ten steps."""
_NAMED_CHECKPOINTS = 5
_SETTLED = {"step", "kind", "accelerator", "environment", "max_rollouts", "options", "budget_seconds"}
_WEIGHTS_FIELDS = ("root", "path", "format", "digest", "step", "weights_version")


class ProbeNotFound(problem.ProblemError, status=404, problem_type="probe-not-found"):
    """No probe with this id is visible to this key."""


class ProbeNotPossible(problem.ProblemError, status=422, problem_type="probe-not-possible"):
    """The step has no rollouts, is not closed, or has no checkpoint to score it with."""


class ProbeStillRuns(problem.ProblemError, status=409, problem_type="probe-still-runs"):
    """The probe has not ended; only an ended probe can be retried."""


class ProbeHasEnded(problem.ProblemError, status=409, problem_type="probe-has-ended"):
    """The probe has ended by itself; there is nothing to cancel."""


class UnknownScorer(problem.ProblemError, status=422, problem_type="unknown-scorer"):
    """A scorer or variant that no worker of this release implements."""


@router.post(
    "/runs/{run}/probes",
    status_code=status.HTTP_201_CREATED,
    responses={200: {"model": ProbeRecord, "description": "An equal request exists; this is its probe"}},
)
def create_probe(
    run: runs.RunIdentifier,
    body: schemas.ProbeCreate,
    context: Context,
    principal: security.Ingester,
    response: Response,
) -> ProbeRecord:
    """Request that workers score a step's rollouts again; an equal request returns the same probe."""
    probe, created = request_probe(context, principal, run, body)
    if not created:
        response.status_code = status.HTTP_200_OK
    return probe


@router.get("/runs/{run}/probes", name="list_probes")
def list_probes_of_run(
    run: runs.RunIdentifier,
    context: Context,
    principal: security.Reader,
    step: Annotated[int | None, Query(ge=0, le=parameters.LARGEST_STEP)] = None,
    cursor: pagination.Cursor = None,
    limit: pagination.Limit = 50,
) -> pagination.Page[ProbeRecord]:
    """Return a page of a run's probes, newest first."""
    with context.database.read() as session:
        return list_probes(session, principal, run, step, cursor, limit)


@router.get("/probes")
def list_probes_of_runs(
    context: Context,
    principal: security.Reader,
    project: Annotated[parameters.Name | None, Query()] = None,
    kind: Annotated[parameters.Name | None, Query(description="such as `exact` or `doctor`; absent: all")] = None,
    cursor: pagination.Cursor = None,
    limit: pagination.Limit = 50,
) -> pagination.Page[ProbeRecord]:
    """Return a page of the probes of all runs that the key may see, newest first."""
    with context.database.read() as session:
        of_runs = (Run.deleted_at_us.is_(None), *(Run.project == each for each in principal.projects(project)))
        of_kind = (Probe.kind == kind,) if kind is not None else ()
        return _page(session, (*of_runs, *of_kind), cursor, limit)


@router.get("/probes/{probe}")
def read_probe(probe: ProbeIdentifier, context: Context, principal: security.Reader) -> ProbeRecord:
    """Return a probe with its jobs, their states and the reasons of failures and of waiting."""
    with context.database.read() as session:
        found, run = get_probe(session, principal, probe)
        return shown(session, run, found)


@router.post("/probes/{probe}/retry", name="retry_probe")
def retry(probe: ProbeIdentifier, context: Context, principal: security.Ingester) -> ProbeRecord:
    """Queue the failed and skipped jobs of an ended probe again, for example when the weights are back."""
    return context.database.write(lambda session: retry_probe(session, principal, probe))


@router.delete("/probes/{probe}", name="cancel_probe")
def cancel(probe: ProbeIdentifier, context: Context, principal: security.Ingester) -> ProbeRecord:
    """Cancel a probe: its unfinished jobs are skipped, and what a worker still sends for them is refused.

    Scores of jobs that are done stay. A cancelled probe can be retried; an equal request finds it as it is.
    """

    def work(session: Session) -> ProbeRecord:
        found, run = get_probe(session, principal, probe)
        jobs = lock_jobs(session, probe)
        state, _ = transitions.state_of_probe(jobs)
        cancelled = end_jobs(session, jobs, CANCELLED)
        if cancelled:
            of = {"project": run.project, "run_id": run.id}
            before, after = {"state": state.value}, {"step": found.step, "jobs": len(cancelled)}
            audit.record(session, principal, "probe.cancel", probe, **of, before=before, after=after)
        elif not any(job.reason == CANCELLED for job in jobs):
            raise ProbeHasEnded(f"the probe has ended as {state.value}: only a queued or running one can be cancelled")
        return shown(session, run, found)

    return context.database.write(work)


def list_probes(
    session: Session, principal: security.Principal, run_id: str, step: int | None, cursor: str | None, limit: int
) -> pagination.Page[ProbeRecord]:
    """Return one page of a run's probes, newest first. Raises RunNotFound, RunDeleted."""
    runs.get_run(session, principal, run_id)
    at_step = (Probe.step == step,) if step is not None else ()
    return _page(session, (Probe.run_id == run_id, *at_step), cursor, limit)


def _page(
    session: Session, conditions: Iterable[ColumnElement[bool]], cursor: str | None, limit: int
) -> pagination.Page[ProbeRecord]:
    query = select(Probe, Run.project).join(Run, Run.id == Probe.run_id).where(*conditions)
    keys = (Probe.created_at_us, Probe.id)
    return pagination.page_of_query(session, query, keys, cursor, limit, partial(_read, session))


def request_probe(
    context: ServiceContext, principal: security.Principal, run_id: str, body: schemas.ProbeCreate
) -> tuple[ProbeRecord, bool]:
    """Return the probe of this request and whether it is new. Raises UnknownScorer, ProbeNotPossible."""
    check_scorers(body)
    with context.database.read() as session:
        run, row, present = _plan(session, principal, run_id, body)
        known = _find_by_request(session, row)
        if known is not None:
            return shown(session, run, known), False
        pinned_rollouts = pinned(context, present, body.max_rollouts)
        logged = attempts.fingerprints_of_attempts(session, run_id, [row["attempt"]])[row["attempt"]]
    with problem.present_file(f"a shard of step {body.step}"):
        count = context.decoders.run(files.count_rollouts, pinned_rollouts)
    if body.kind == probe_kinds.DOCTOR.name and not count.with_log_probs:
        raise ProbeNotPossible(
            f"the rollouts of step {body.step} have neither rollout_log_probs nor trainer_log_probs: there is nothing "
            "that the doctor could explain"
        )
    fingerprints = environments.run_fingerprints(count.attributes, logged)
    wanted = environments.wanted_environments(body.environment, fingerprints)
    if body.environment == environments.OF_RUN and not all(each.names for each in wanted.values() if each.is_required):
        raise ProbeNotPossible(
            "the environment of this run is unknown: log its rollouts with the batch attributes `engine_fingerprint` "
            "and `trainer_fingerprint`, or ask for an environment by name, or for `any`"
        )
    scorers = {asked.scorer for asked in body.scorers} | schemas.scorers_of_pairs(body.exact_pairs)
    row["options"] = environments.with_declared_precision(body.options, scorers, fingerprints["trainer"])
    return context.database.write(lambda session: _insert(session, principal, row, count, wanted))


def check_scorers(body: schemas.ProbeCreate) -> None:
    """Raise UnknownScorer or ProbeNotPossible if a request names scorers, pairs or options that are not available."""
    kind = probe_kinds.PROBE_KINDS[body.kind]
    for asked in body.scorers:
        if asked.scorer not in available_scorers():
            suggestion = errors.did_you_mean(asked.scorer, available_scorers())
            raise UnknownScorer(
                f"unknown scorer {asked.scorer!r}{suggestion}; available scorers: {', '.join(available_scorers())}"
            )
        if asked.variant not in VARIANTS:
            raise UnknownScorer(f"unknown variant {asked.variant!r}; variants: {', '.join(map(repr, VARIANTS))}")
        if asked.scorer not in kind.usable_scorers():
            raise UnknownScorer(
                f"{asked.scorer} {kind.unable}; scorers that {kind.can}: {', '.join(kind.usable_scorers())}"
            )
    for pair in body.exact_pairs:
        if pair not in EXACT_PAIRS:
            suggestion = errors.did_you_mean(pair, EXACT_PAIRS)
            raise UnknownScorer(f"unknown exact pair {pair!r}{suggestion}; available pairs: {', '.join(EXACT_PAIRS)}")
    if len(set(body.scorers)) != len(body.scorers) or len(set(body.exact_pairs)) != len(body.exact_pairs):
        raise ProbeNotPossible("a scorer is named twice: name each scorer and variant, and each exact pair, once")
    unused = set(body.options) - {asked.scorer for asked in body.scorers} - schemas.scorers_of_pairs(body.exact_pairs)
    if unused:
        raise ProbeNotPossible(f"options name {', '.join(sorted(unused))}, which is not among the scorers")


def _plan(
    session: Session, principal: security.Principal, run_id: str, body: schemas.ProbeCreate
) -> tuple[Run, dict[str, Any], list[Shard]]:
    """Return the run, the row of the probe except what is counted, and the shards with its rollouts."""
    run = runs.get_run(session, principal, run_id)
    key = attempts.resolve_step(session, run_id, body.step, body.attempt)
    step = find_step(session, key)
    if step is None:
        raise ProbeNotPossible(f"step {key.step} of attempt {key.attempt} has no rollouts to score")
    if step.closed_at_us is None:
        raise ProbeNotPossible(
            f"step {key.step} is not closed yet: {step.received_shards} of {step.expected_shards} shards are stored"
        )
    checkpoint = session.get(Checkpoint, tuple(key))
    if checkpoint is None:
        raise ProbeNotPossible(
            f"no checkpoint is announced for step {key.step} of attempt {key.attempt}{_announced(session, key)}: the "
            "trainer announces saved weights with log_checkpoint(step, root=…, path=…)"
        )
    if checkpoint.expires_at_us is not None and checkpoint.expires_at_us <= clock.now_us():
        raise ProbeNotPossible(f"the checkpoint of step {key.step} has expired: its weights are gone")
    shards = shards_of_step(session, key)
    present = [shard for shard in shards if shard.tokens_purged_at_us is None]
    if not present:
        raise ProbeNotPossible(f"step {key.step} cannot be replayed: {PURGED}")
    by_name = sorted(body.scorers, key=lambda each: (each.scorer, each.variant))
    # Of two scorers the order matters: the second one is the reference, or gives μ.
    asked = body.scorers if probe_kinds.PROBE_KINDS[body.kind].scorers == 2 else by_name
    meant = {
        **body.model_dump(mode="json", include=_SETTLED),
        "attempt": key.attempt,
        "scorers": [each.model_dump() for each in asked],
        "exact_pairs": sorted(body.exact_pairs),
        "selection": [selected_rollouts(shard) for shard in present],
        "checkpoint": {name: getattr(checkpoint, name) for name in _WEIGHTS_FIELDS},
        "candidates": _candidates(session, principal, run, key, body),
    }
    of_request = {"request_digest": digests.digest_of_json(meant), "priority": body.priority}
    pinned_weights = {"checkpoint_expires_at_us": checkpoint.expires_at_us}
    return run, {**meant, **of_request, **pinned_weights, "run_id": run.id}, present


def _announced(session: Session, key: events.StepKey) -> str:
    """Return the end of a message: the newest announced steps of an attempt."""
    query = select(Checkpoint.step).filter_by(run_id=key.run_id, attempt=key.attempt)
    steps = sorted(session.scalars(query.order_by(Checkpoint.step.desc()).limit(_NAMED_CHECKPOINTS)))
    if not steps:
        return ", nor for any other step of it"
    return f" (the newest that are: {', '.join(map(str, steps))})"


def _candidates(
    session: Session, principal: security.Principal, run: Run, key: events.StepKey, body: schemas.ProbeCreate
) -> list[dict[str, Any]] | None:
    """Return the weights that the doctor tries besides those of the step; None for other probes.

    The checkpoints of earlier steps are tried alternately from the nearest and from the first one.
    """
    if body.kind != probe_kinds.DOCTOR.name:
        return None
    tried = [] if body.against is None else [_weights_of_other(session, principal, run, body.against, key.step)]
    left = list(earlier_checkpoints(session, key))
    for number in range(min(body.max_candidates, len(left))):
        each = left.pop(0 if number % 2 else -1)
        tried.append({name: getattr(each, name) for name in _WEIGHTS_FIELDS})
    return tried


def _weights_of_other(
    session: Session, principal: security.Principal, run: Run, against: str, step: int
) -> dict[str, Any]:
    """Return the newest weights up to `step` of the run `against`, with that run's title."""
    other = runs.get_run(session, principal, against)
    title = other.name or other.key
    if other.project != run.project or other.id == run.id:
        raise ProbeNotPossible(f"against must be another run of the project {run.project}, got {title}")
    started = attempts.attempts_of_run(session, other.id)
    key = events.StepKey(other.id, attempts.active_attempt_of(started, step) or 0, step + 1)
    found = earlier_checkpoints(session, key)
    if not found:
        raise ProbeNotPossible(f"the run {title} has no announced weights up to step {step} that are left")
    return {name: getattr(found[-1], name) for name in _WEIGHTS_FIELDS} | {"run": title}


def _insert(
    session: Session,
    principal: security.Principal,
    row: dict[str, Any],
    count: files.RolloutCount,
    wanted: Mapping[str, environments.WantedEnvironment],
) -> tuple[ProbeRecord, bool]:
    run = runs.lock_run(session, principal, row["run_id"])
    key = events.StepKey(run.id, row["attempt"], row["step"])
    present = (shard for shard in shards_of_step(session, key) if shard.tokens_purged_at_us is None)
    if [selected_rollouts(shard) for shard in present] != row["selection"]:
        raise ProbeNotPossible(
            f"rollouts of step {key.step} were purged or arrived while the request was checked: request the probe again"
        )
    now = database_now_us(session)
    counted = {name: getattr(count, name) for name in ("rollouts", "tokens", "rollout_set_digest")}
    sampled = count.rollouts < count.of_rollouts
    new = {"id": new_identifier("probe"), "from_sample": sampled, "created_at_us": now}
    created = insert_if_absent(session, Probe, {**row, **counted, **new})
    probe = _find_by_request(session, row)
    assert probe is not None
    if created:
        live = workers.live_workers(session, run.project, now)
        near = session.scalar(select(is_near_open_alert(run.id, key.step)))
        session.add_all(transitions.new_jobs(probe, live, now, wanted, is_near_alert=bool(near)))
        session.flush()
    return shown(session, run, probe), created


def rollouts_of_probe(context: ServiceContext, session: Session, probe: Probe) -> files.PinnedRollouts:
    """Return the rollouts that a probe pinned, for a decoder. Raises TokensPurged."""
    chosen = {selected[0] for selected in probe.selection}
    shards = shards_with_tokens(session, events.StepKey(probe.run_id, probe.attempt, probe.step))
    return pinned(context, [each for each in shards if each.shard in chosen], probe.max_rollouts)


def retry_probe(session: Session, principal: security.Principal, probe_id: str) -> ProbeRecord:
    """Queue the failed and skipped jobs of an ended probe again, with all their tries.

    Raises ProbeStillRuns, and ProbeNotPossible or TokensPurged if its rollouts no longer exist.
    """
    probe, run = get_probe(session, principal, probe_id)
    # The run is locked first, as in a purge of the step.
    runs.lock_run(session, principal, run.id)
    jobs = lock_jobs(session, probe_id)
    if not all(job.state in transitions.ENDED for job in jobs):
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
    unfinished = [job for job in jobs if job.state not in transitions.ENDED]
    held = [job.lease_id for job in unfinished if job.lease_id is not None]
    leases = {lease.id: lease for lease in session.scalars(select(Lease).where(Lease.id.in_(held)))} if held else {}
    now = database_now_us(session)
    for job in unfinished:
        lease = leases.get(job.lease_id or "")
        transitions.end(job, lease, transitions.Outcome.CANCELLED, state, now, reason)
    session.flush()
    return unfinished


def get_probe(session: Session, principal: security.Principal, probe_id: str) -> tuple[Probe, Run]:
    probe = session.get(Probe, probe_id)
    run = runs.find_run(session, probe.run_id) if probe is not None else None
    if probe is None or run is None or not principal.sees(run.project):
        raise ProbeNotFound(f"there is no probe {probe_id}")
    return probe, runs.get_run(session, principal, probe.run_id)


def shown(session: Session, run: Run, probe: Probe) -> ProbeRecord:
    return _read(session, [(probe, run.project)])[0]


def selected_rollouts(shard: Shard) -> list[Any]:
    """Return values that identify the rollouts of a shard."""
    return [shard.shard, shard.digest]


def pinned(context: ServiceContext, shards: Sequence[Shard], max_rollouts: int | None) -> files.PinnedRollouts:
    """Return the rollouts of shards, or a sample of them, for a decoder."""
    samples = tuple(shard.sampled_rollouts for shard in shards)
    return files.PinnedRollouts(
        files=tuple(context.store.file(shard.file) for shard in shards),
        max_rollouts=max_rollouts,
        samples=samples,
        unstored=sum(
            shard.rollouts - sample for shard, sample in zip(shards, samples, strict=True) if sample is not None
        ),
    )


def _read(session: Session, probes: Sequence[Any]) -> list[ProbeRecord]:
    """Return the probes, each with the project of its run, as they are shown."""
    query = select(ProbeJob).where(ProbeJob.probe_id.in_([probe.id for probe, _ in probes]))
    jobs: dict[str, list[ProbeJob]] = defaultdict(list)
    for job in session.scalars(query.order_by(ProbeJob.engine)):
        jobs[job.probe_id].append(job)
    now = database_now_us(session)
    live = {project: workers.live_workers(session, project, now) for project in {project for _, project in probes}}
    waiting = {
        job.id: transitions.waiting_reason(job, live[project])
        for probe, project in probes
        for job in jobs[probe.id]
        if job.state == transitions.JobState.QUEUED
    }
    found = []
    for probe, _ in probes:
        own = jobs[probe.id]
        state, reason = transitions.state_of_probe(own)
        record = from_attributes(
            ProbeRecord,
            probe,
            run=probe.run_id,
            state=state.value,
            reason=reason or next((waiting[job.id] for job in own if waiting.get(job.id)), None),
            jobs=tuple(
                from_attributes(
                    JobRecord,
                    job,
                    engine=job.engine.partition(".")[0],
                    attempts=job.tries,
                    reason=job.reason or waiting.get(job.id),
                    environments=tuple(job.environments),
                    environment_note=schemas.environment_note(job),
                )
                for job in own
            ),
        )
        found.append(record)
    return found


def cancel_jobs_of_run(session: Session, removed: events.RunRemoved) -> None:
    """Skip the unfinished jobs of a deleted run."""
    query = select(ProbeJob).join(Probe, Probe.id == ProbeJob.probe_id).where(Probe.run_id == removed.run_id)
    query = query.where(ProbeJob.state.not_in(sorted(transitions.ENDED))).order_by(ProbeJob.id)
    end_jobs(session, session.scalars(query.with_for_update(of=ProbeJob)).all(), "the run was deleted")


def _find_by_request(session: Session, row: Mapping[str, Any]) -> Probe | None:
    return session.scalar(select(Probe).filter_by(run_id=row["run_id"], request_digest=row["request_digest"]))


def earlier_checkpoints(session: Session, key: events.StepKey) -> Sequence[Checkpoint]:
    """Return the unexpired checkpoints of the steps before `key.step` from which it was trained, by step."""
    begun = attempts.attempts_of_run(session, key.run_id)
    place = next(place for place, each in enumerate(begun) if each.attempt == key.attempt)
    chosen = attempts.in_ranges(attempts.active_ranges(begun[: place + 1], 0, key.step - 1), Checkpoint)
    left = or_(Checkpoint.expires_at_us.is_(None), Checkpoint.expires_at_us > clock.now_us())
    query = select(Checkpoint).where(Checkpoint.run_id == key.run_id, chosen, left)
    return session.scalars(query.order_by(Checkpoint.step)).all()


def is_near_open_alert(run_id: Any, step: Any) -> ColumnElement[bool]:
    """Return the condition that a step is near an open or acknowledged alert of its run. Takes values or columns."""
    near = Alert.step.between(step - ALERT_WINDOW_STEPS, step + ALERT_WINDOW_STEPS)
    of_run = (Alert.run_id == run_id, Alert.state.in_(STANDING))
    return select(Alert.id).where(*of_run, near).exists()
