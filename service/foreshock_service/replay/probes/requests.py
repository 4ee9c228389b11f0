"""HTTP of probes, and requests for them: check a request, plan it, and create its probe or find the existing one."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import Path, Query, Response, status
from sqlalchemy import select
from sqlalchemy.orm import Session

from foreshock import clock, digests, errors, probe_kinds
from foreshock.api.probes import ProbeRecord
from foreshock.scorers import EXACT_PAIRS, VARIANTS, available_scorers
from foreshock_service.platform import pagination, parameters, problem, security
from foreshock_service.platform.context import Context, ServiceContext
from foreshock_service.platform.database.engine import database_now_us, insert_if_absent
from foreshock_service.platform.database.tables import Checkpoint, Probe, Run, new_identifier
from foreshock_service.replay.probes import environments, jobs, pinned_rollouts, schemas, service, workers
from foreshock_service.runs import attempts, events, run_endpoints, runs
from foreshock_service.runs.shards import PURGED, shards_of_step
from foreshock_service.runs.steps import find_step

router = parameters.api_router(prefix="/v1", tags=["probes"])
ProbeIdentifier = Annotated[str, Path(max_length=100, pattern=r"^[A-Za-z0-9_]+$")]


@router.post(
    "/runs/{run}/probes",
    status_code=status.HTTP_201_CREATED,
    responses={200: {"model": ProbeRecord, "description": "An equal request exists; this is its probe"}},
)
def create_probe(
    run: run_endpoints.RunIdentifier,
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


@router.get("/runs/{run}/probes")
def list_probes(
    run: run_endpoints.RunIdentifier,
    context: Context,
    principal: security.Reader,
    step: Annotated[int | None, Query(ge=0, le=parameters.LARGEST_STEP)] = None,
    cursor: pagination.Cursor = None,
    limit: pagination.Limit = 50,
) -> pagination.Page[ProbeRecord]:
    """Return a page of a run's probes, newest first."""
    with context.database.read() as session:
        return service.list_probes(session, principal, run, step, cursor, limit)


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
        return service.list_probes_of_runs(session, principal.projects(project), kind, cursor, limit)


@router.get("/probes/{probe}")
def read_probe(probe: ProbeIdentifier, context: Context, principal: security.Reader) -> ProbeRecord:
    """Return a probe with its jobs, their states and the reasons of failures and of waiting."""
    with context.database.read() as session:
        return service.read_probe(session, principal, probe)


@router.post("/probes/{probe}/retry")
def retry_probe(probe: ProbeIdentifier, context: Context, principal: security.Ingester) -> ProbeRecord:
    """Queue the failed and skipped jobs of an ended probe again, for example when the weights are back."""
    return context.database.write(lambda session: service.retry_probe(session, principal, probe))


@router.delete("/probes/{probe}")
def cancel_probe(probe: ProbeIdentifier, context: Context, principal: security.Ingester) -> ProbeRecord:
    """Cancel a probe: its unfinished jobs are skipped, and what a worker still sends for them is refused.

    Scores of jobs that are done stay. A cancelled probe can be retried; an equal request finds it as it is.
    """
    return context.database.write(lambda session: service.cancel_probe(session, principal, probe))


_NAMED_CHECKPOINTS = 5
_SETTLED = {"step", "kind", "accelerator", "environment", "max_rollouts", "options", "budget_seconds"}
_WEIGHTS_FIELDS = ("root", "path", "format", "digest", "step", "weights_version")


class UnknownScorer(problem.ProblemError, status=422, problem_type="unknown-scorer"):
    """A scorer or variant that no worker of this release implements."""


@dataclass(frozen=True, slots=True)
class _Plan:
    """A request with what it resolves to: its rollouts, and the row of its probe except what is counted."""

    run: Run
    rollouts: pinned_rollouts.PinnedRollouts
    attempt_fingerprint: dict[str, Any]
    row: dict[str, Any]


def request_probe(
    context: ServiceContext, principal: security.Principal, run_id: str, body: schemas.ProbeCreate
) -> tuple[ProbeRecord, bool]:
    """Return the probe of this request and whether it is new. Raises UnknownScorer, ProbeNotPossible."""
    check_scorers(body)
    with context.database.read() as session:
        plan = _plan(context, session, principal, run_id, body)
        known = service.find_by_request(session, run_id, plan.row["request_digest"])
        if known is not None:
            return service.shown(session, plan.run, known), False
    with problem.present_file(f"a shard of step {body.step}"):
        count = context.decoders.run(pinned_rollouts.count_rollouts, plan.rollouts)
    if body.kind == probe_kinds.DOCTOR.name and not count.with_log_probs:
        raise service.ProbeNotPossible(
            f"the rollouts of step {body.step} have neither rollout_log_probs nor trainer_log_probs: there is nothing "
            "that the doctor could explain"
        )
    fingerprints = environments.run_fingerprints(count.attributes, plan.attempt_fingerprint)
    wanted = environments.wanted_environments(body.environment, fingerprints)
    if body.environment == environments.OF_RUN and not all(each.names for each in wanted.values() if each.is_required):
        raise service.ProbeNotPossible(
            "the environment of this run is unknown: log its rollouts with the batch attributes `engine_fingerprint` "
            "and `trainer_fingerprint`, or ask for an environment by name, or for `any`"
        )
    scorers = {asked.scorer for asked in body.scorers} | schemas.scorers_of_pairs(body.exact_pairs)
    plan.row["options"] = environments.with_declared_precision(body.options, scorers, fingerprints["trainer"])
    return context.database.write(lambda session: _insert(session, principal, plan, count, wanted))


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
        raise service.ProbeNotPossible(
            "a scorer is named twice: name each scorer and variant, and each exact pair, once"
        )
    unused = set(body.options) - {asked.scorer for asked in body.scorers} - schemas.scorers_of_pairs(body.exact_pairs)
    if unused:
        raise service.ProbeNotPossible(f"options name {', '.join(sorted(unused))}, which is not among the scorers")


def _plan(
    context: ServiceContext, session: Session, principal: security.Principal, run_id: str, body: schemas.ProbeCreate
) -> _Plan:
    run = runs.get_run(session, principal, run_id)
    key = attempts.resolve_step(session, run_id, body.step, body.attempt)
    step = find_step(session, key)
    if step is None:
        raise service.ProbeNotPossible(f"step {key.step} of attempt {key.attempt} has no rollouts to score")
    if step.closed_at_us is None:
        raise service.ProbeNotPossible(
            f"step {key.step} is not closed yet: {step.received_shards} of {step.expected_shards} shards are stored"
        )
    checkpoint = service.find_checkpoint(session, *key)
    if checkpoint is None:
        raise service.ProbeNotPossible(
            f"no checkpoint is announced for step {key.step} of attempt {key.attempt}{_announced(session, key)}: the "
            "trainer announces saved weights with log_checkpoint(step, root=…, path=…)"
        )
    if checkpoint.expires_at_us is not None and checkpoint.expires_at_us <= clock.now_us():
        raise service.ProbeNotPossible(f"the checkpoint of step {key.step} has expired: its weights are gone")
    shards = shards_of_step(session, key)
    present = [shard for shard in shards if shard.tokens_purged_at_us is None]
    if not present:
        raise service.ProbeNotPossible(f"step {key.step} cannot be replayed: {PURGED}")
    by_name = sorted(body.scorers, key=lambda each: (each.scorer, each.variant))
    # Of two scorers the order matters: the second one is the reference, or gives μ.
    asked = body.scorers if probe_kinds.PROBE_KINDS[body.kind].scorers == 2 else by_name
    meant = {
        **body.model_dump(mode="json", include=_SETTLED),
        "attempt": key.attempt,
        "scorers": [each.model_dump() for each in asked],
        "exact_pairs": sorted(body.exact_pairs),
        "selection": [service.selected_rollouts(shard) for shard in present],
        "checkpoint": {name: getattr(checkpoint, name) for name in _WEIGHTS_FIELDS},
        "candidates": _candidates(session, principal, run, key, body),
    }
    of_request = {"request_digest": digests.digest_of_json(meant), "priority": body.priority}
    return _Plan(
        run=run,
        rollouts=service.pinned_rollouts(context, present, body.max_rollouts),
        attempt_fingerprint=attempts.fingerprints_of_attempts(session, run_id, [key.attempt])[key.attempt],
        row={**meant, **of_request, "run_id": run.id, "checkpoint_expires_at_us": checkpoint.expires_at_us},
    )


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
    left = list(service.earlier_checkpoints(session, key))
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
        raise service.ProbeNotPossible(f"against must be another run of the project {run.project}, got {title}")
    started = attempts.attempts_of_run(session, other.id)
    key = events.StepKey(other.id, attempts.active_attempt_of(started, step) or 0, step + 1)
    found = service.earlier_checkpoints(session, key)
    if not found:
        raise service.ProbeNotPossible(f"the run {title} has no announced weights up to step {step} that are left")
    return {name: getattr(found[-1], name) for name in _WEIGHTS_FIELDS} | {"run": title}


def _insert(
    session: Session,
    principal: security.Principal,
    plan: _Plan,
    count: pinned_rollouts.RolloutCount,
    wanted: Mapping[str, environments.WantedEnvironment],
) -> tuple[ProbeRecord, bool]:
    runs.lock_run(session, principal, plan.run.id)
    key = events.StepKey(plan.run.id, plan.row["attempt"], plan.row["step"])
    present = (shard for shard in shards_of_step(session, key) if shard.tokens_purged_at_us is None)
    if [service.selected_rollouts(shard) for shard in present] != plan.row["selection"]:
        raise service.ProbeNotPossible(
            f"rollouts of step {key.step} were purged or arrived while the request was checked: request the probe again"
        )
    now = database_now_us(session)
    counted = {name: getattr(count, name) for name in ("rollouts", "tokens", "rollout_set_digest")}
    sampled = count.rollouts < count.of_rollouts
    new = {"id": new_identifier("probe"), "from_sample": sampled, "created_at_us": now}
    created = insert_if_absent(session, Probe, {**plan.row, **counted, **new})
    probe = service.find_by_request(session, plan.run.id, plan.row["request_digest"])
    assert probe is not None
    if created:
        live = workers.live_workers(session, plan.run.project, now)
        near = session.scalar(select(service.is_near_open_alert(plan.run.id, key.step)))
        session.add_all(jobs.new_jobs(probe, live, now, wanted, is_near_alert=bool(near)))
        session.flush()
    return service.shown(session, plan.run, probe), created
