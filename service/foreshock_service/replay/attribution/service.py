"""Attribution: compute it when scores are published, store it, and read it.

The transaction that publishes scores marks the step's attribution as stale and wakes the worker of the process, which
computes it, and every few seconds what else is stale: after a crash, or if late rollouts arrived. A read computes only
the conclusions, from the stored document.
"""

import contextlib
import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from sqlalchemy import ColumnElement, select, update
from sqlalchemy.orm import Session

from foreshock import clock, scorers
from foreshock.api import attribution as answers
from foreshock.api import runs as run_answers
from foreshock.api.records import from_attributes, parse, to_json
from foreshock.diagnosis import attribution, conclusion
from foreshock.environment import Environment
from foreshock.measures.estimators.attribution import METHOD, Attribution
from foreshock_service.platform import parameters, problem, security
from foreshock_service.platform.context import ServiceContext
from foreshock_service.platform.database import engine, tables
from foreshock_service.platform.database.session import after_commit
from foreshock_service.platform.jobs import Job, JobRunner
from foreshock_service.replay import files
from foreshock_service.replay.attribution import compute
from foreshock_service.replay.probes import service
from foreshock_service.replay.probes.environments import declared_precision, precision_in_words
from foreshock_service.replay.results import publishing
from foreshock_service.replay.results.documents import exact_of_step
from foreshock_service.replay.results.scores import newest_scores, stored_score
from foreshock_service.runs import attempts, due, events, findings, measurements, runs, steps
from foreshock_service.runs.failing_runs import RunIsolated
from foreshock_service.runs.shards import shards_with_tokens

router = parameters.api_router(prefix="/v1/runs/{run}/steps/{step}", tags=["attribution"])

_AGAIN_AFTER_US = 30_000_000
"""A computation that failed is repeated after this time."""

_RETRY_AFTER_SECONDS = 5
DRIFT_STEPS = 20
"""The newest other probed steps, with which the conclusions compare a step."""
MOST_STEPS = 200
"""The newest attributed steps of a run, which are read for its causes: one takes about a millisecond."""
_TITLES: dict[conclusion.ConclusionKind, str] = {
    "trainer-precision": "the trainer computes in float32 and its replay does not"
}


class AttributionNotFound(problem.ProblemError, status=404, problem_type="attribution-not-found"):
    """No replayed scores of this step are published: request a probe."""


class AttributionNotPossible(problem.ProblemError, status=404, problem_type="attribution-not-possible"):
    """The logged and published scores of this step are fewer than two of the chain."""


class AttributionPending(problem.ProblemError, status=503, problem_type="attribution-pending"):
    """Scores are published and the step's first attribution is being computed: retry."""


@dataclass(frozen=True, slots=True)
class AttributionInputs:
    """The files that a step's attribution is computed from.

    `version` identifies them: it changes if scores are published or rollouts arrive.
    """

    version: str
    rollouts: files.PinnedRollouts
    scores: tuple[files.StoredScore, ...]
    attempt_fingerprint: dict[str, Any]


@router.get("/attribution")
def read_attribution(asked: attempts.StepOfRequest) -> answers.AttributionRecord:
    """Return the causes of the step's mismatch: the links of the chain with their shares, and the noise floors.

    404 `attribution-not-found`: no scores of the step are published; request a probe. 404 `attribution-not-possible`:
    the published scores are fewer than two of the chain. 503 `attribution-pending` with Retry-After: scores are
    published and the first attribution is being computed. `stale: true`: scores or rollouts arrived since, and a new
    attribution is being computed.
    """
    with asked.context.database.read() as session:
        found = attribution_of_step(session, asked.principal, asked.run, asked.step, asked.attempt)
        key = events.StepKey(asked.run, found.attempt, asked.step)
        incomplete = steps.incomplete_step(steps.find_step(session, key))
        return replace(found, incomplete=incomplete)


def attribution_of_step(
    session: Session, principal: security.Principal, run_id: str, step: int, attempt: int | None
) -> answers.AttributionRecord:
    """Return the stored attribution of a step.

    Raises AttributionNotFound, AttributionNotPossible, AttributionPending, RunNotFound, RunDeleted.
    """
    run = runs.get_run(session, principal, run_id)
    key = attempts.resolve_step(session, run_id, step, attempt)
    found = session.get(tables.Attribution, tuple(key))
    if found is None:
        raise AttributionNotFound(
            f"no scores of step {step} of attempt {key.attempt} are published: "
            f"request a probe with POST /v1/runs/{run_id}/probes"
        )
    if found.document is not None:
        return _read(session, run, parse(answers.AttributionDocument, found.document), found.stale)
    if found.stale:
        raise AttributionPending(
            f"the attribution of step {step} is being computed: retry in {_RETRY_AFTER_SECONDS} s",
            headers={"Retry-After": str(_RETRY_AFTER_SECONDS)},
        )
    names = ", ".join(scorers.score_name(score.scorer, score.variant) for score in newest_scores(session, key))
    raise AttributionNotPossible(
        f"the scores of step {step} ({names}) and those that its run logs are fewer than two of the chain "
        f"{', '.join(scorers.CHAIN)}: log rollout_log_probs and trainer_log_probs, or probe more scorers"
    )


def _read(
    session: Session, run: tables.Run, document: answers.AttributionDocument, stale: bool
) -> answers.AttributionRecord:
    """Return the document with its conclusions, which also use the attributions of the run's other probed steps."""
    of_others = (tables.Attribution.step != document.step, tables.Attribution.computed_at_us.is_not(None))
    others = newest_documents(session, run.id, DRIFT_STEPS, *of_others)
    plain = {score.scorer: score.fingerprint for score in document.scores if not score.variant}
    exact = []
    for each in exact_of_step(session, events.StepKey(run.id, document.attempt, document.step)):
        # The fingerprint fields that differ from those of the scores of the same names.
        differing: set[str] = set()
        for name, own in ((each.target, each.target_fingerprint), (each.behaviour, each.behaviour_fingerprint)):
            other = plain.get(name, own)
            differing |= {field for field in own.keys() | other.keys() if own.get(field) != other.get(field)}
        settings = tuple(sorted(differing - {"batch_composition"}))
        exact.append(from_attributes(answers.ExactOfLinkRecord, each, other_settings=settings))
    earlier = [parse(answers.AttributionDocument, each) for _, each in reversed(others) if each is not None]
    conclusions = attribution.conclude_attribution(document, earlier, tuple(exact))
    return from_attributes(
        answers.AttributionRecord,
        document,
        stale=stale,
        exact=tuple(exact),
        conclusions=tuple(from_attributes(answers.ConclusionRecord, each) for each in conclusions),
        incomplete=None,
    )


def newest_replayed_steps(session: Session, principal: security.Principal, run_id: str, limit: int) -> Sequence[int]:
    """Return up to `limit` active steps that have replayed scores, the newest first."""
    runs.get_run(session, principal, run_id)
    return [key.step for key, _ in newest_documents(session, run_id, limit)]


def mark_attribution_stale(session: Session, published: publishing.ScoresPublished) -> None:
    """Mark the step's attribution as stale, in the transaction that publishes its scores."""
    _mark_stale(session, published.key, clock.now_us())


def mark_stale_after_late_rollouts(session: Session, closed: events.StepClosed) -> None:
    """Mark the attribution of a step as stale if it has one: rollouts arrived after its scores were published."""
    if session.get(tables.Attribution, tuple(closed.key)) is not None:
        _mark_stale(session, closed.key, clock.now_us())


class Attributing(JobRunner):
    """The worker that computes stale attributions; published scores wake it."""

    def __init__(self, context: ServiceContext) -> None:
        job = Job("compute_stale_attributions", partial(compute_stale_attributions, context))
        super().__init__("attribution", context.database, [job], context.settings.sweep_interval_seconds)
        context.events.subscribe(publishing.ScoresPublished, lambda session, _: after_commit(session, self.wake))


def compute_stale_attributions(context: ServiceContext) -> int:
    """Compute the attributions that are stale, and return their number."""
    with context.database.read() as session:
        table = tables.Attribution
        query = select(table.run_id, table.attempt, table.step).join(tables.Run, tables.Run.id == table.run_id)
        due = (table.stale, table.changed_at_us <= clock.now_us(), tables.Run.deleted_at_us.is_(None))
        found = session.execute(query.where(*due).order_by(table.changed_at_us))
        stale = [events.StepKey(*row) for row in found]
    return sum(try_to_compute(context, key) for key in stale if not context.stopping.is_set())


def try_to_compute(context: ServiceContext, key: events.StepKey) -> bool:
    """Compute the step's attribution and return True; on an error it stays stale, for another try later."""
    with RunIsolated(context.database, context.events, key.run_id, f"attribute the mismatch of its step {key.step}"):
        try:
            compute_attribution(context, key)
            return True
        except Exception:
            context.database.write(lambda session: _mark_stale(session, key, clock.now_us() + _AGAIN_AFTER_US))
            raise
    return False


def compute_attribution(context: ServiceContext, key: events.StepKey) -> None:
    """Compute and store the step's attribution and the measurements of its replayed scores.

    If scores or rollouts arrive meanwhile it stays stale, and the next round computes it. If the tokens or scores were
    purged or deleted, the stored attribution stays unchanged, and is not stale any more.
    """
    inputs = None
    with context.database.read() as session, contextlib.suppress(problem.TokensPurged):
        inputs = attribution_inputs(context, session, key)
    if inputs is None or not inputs.scores:
        settled = update(tables.Attribution).filter_by(**key._asdict()).values(stale=False)
        context.database.write(lambda session: session.execute(settled))
        return
    result = context.decoders.run(compute.attribute_step, inputs.rollouts, inputs.scores, inputs.attempt_fingerprint)

    def store(session: Session) -> None:
        is_stored = runs.lock_run_for_background(session, key.run_id) is not None and store_attribution(
            context, session, key, inputs.version, result
        )
        if is_stored and steps.is_closed(session, key):
            steps.mark_step(session, key)

    context.database.write(store)


def attribution_inputs(context: ServiceContext, session: Session, key: events.StepKey) -> AttributionInputs:
    """Return the files of the step's rollouts and of its newest scores. Raises TokensPurged."""
    rollouts = service.pinned(context, shards_with_tokens(session, key), None)
    chosen = newest_scores(session, key)
    attempt = attempts.find_attempt(session, key.run_id, key.attempt)
    lines = [f"{score.scorer} {score.variant} {score.job_id} {score.token}" for score in chosen]
    lines += [path.name for path in rollouts.files]
    return AttributionInputs(
        version=hashlib.sha256("\n".join(lines).encode()).hexdigest(),
        rollouts=rollouts,
        # Scores whose files retention has purged are left out.
        scores=tuple(each for score in chosen if (each := stored_score(session, context.store, score)) is not None),
        attempt_fingerprint=dict(attempt.fingerprint) if attempt is not None else {},
    )


def store_attribution(
    context: ServiceContext, session: Session, key: events.StepKey, version: str, result: compute.AttributionResult
) -> bool:
    """Store the attribution computed from the inputs of `version`; False if they have changed. The run is locked."""
    # Locked until the transaction ends, so that nothing marks it as stale meanwhile.
    session.execute(select(tables.Attribution.step).filter_by(**key._asdict()).with_for_update())
    if attribution_inputs(context, session, key).version != version:
        return False
    now = clock.now_us()
    document = None
    if result.attribution is not None:
        used = [(each.scorer, each.variant, each.fingerprint) for each in result.used]
        sources = [
            from_attributes(answers.ScoreSourceRecord, score)
            for score in newest_scores(session, key)
            if (score.scorer, score.variant, score.fingerprint) in used
        ]
        document = _document_of(key, result.attribution, result, sources, now)
    found = None if document is None else to_json(document)
    row = {**key._asdict(), "stale": False, "changed_at_us": now, "document": found, "computed_at_us": now}
    engine.upsert(session, tables.Attribution, [row], events.StepKey._fields)
    due.mark(session, key.run_id, source="attribution")
    measurements.store_measurements(session, key, result.comparisons)
    session.flush()
    return True


def _mark_stale(session: Session, key: events.StepKey, now_us: int) -> None:
    """Mark the step's attribution as stale; adds a row without a document if there is none."""
    row = {**key._asdict(), "stale": True, "changed_at_us": now_us}
    engine.upsert(session, tables.Attribution, [row], events.StepKey._fields)


def newest_documents(
    session: Session, run_id: str, limit: int, *chosen: ColumnElement[bool]
) -> list[tuple[events.StepKey, dict[str, Any] | None]]:
    """Return the documents of up to `limit` active steps that have replayed scores, the newest first.

    A document is None before it is computed, and if the scores give no attribution.
    """
    active = attempts.active_rows(session, run_id, tables.Attribution)
    query = select(tables.Attribution.attempt, tables.Attribution.step, tables.Attribution.document)
    query = query.where(tables.Attribution.run_id == run_id, active, *chosen)
    found = session.execute(query.order_by(tables.Attribution.step.desc()).limit(limit))
    return [(events.StepKey(run_id, attempt, step), document) for attempt, step, document in found]


def _document_of(
    key: events.StepKey,
    found: Attribution,
    result: compute.AttributionResult,
    scores: Sequence[answers.ScoreSourceRecord],
    computed_at_us: int,
) -> answers.AttributionDocument:
    floors, branch = {floor.scorer: floor.k3_kl for floor in result.floors}, found.side_branch

    def with_excess(links: Iterable[answers.LinkRecord]) -> tuple[answers.LinkRecord, ...]:
        excess = compute.excess_over_floors
        return tuple(replace(link, excess_k3_kl=excess(link.name, link.k3_kl, floors)) for link in links)

    known = {name: made for name, made in result.run_fingerprints.items() if made is not None}
    environments = {name: Environment.of_fingerprint(made) for name, made in known.items()}
    environments |= {score.name: score.environment for score in result.used}
    return from_attributes(
        answers.AttributionDocument,
        found,
        run=key.run_id,
        attempt=key.attempt,
        step=key.step,
        links=with_excess(found.links),
        whole=with_excess([found.whole])[0],
        side_branch=branch and replace(branch, links=with_excess(branch.links)),
        floors=result.floors,
        of_rollouts=result.of_rollouts,
        from_sample=found.rollouts < result.of_rollouts,
        scores=tuple(scores),
        environments={
            name: compute.environment_record(environments[name]) if name in environments else None
            for name in found.chain
        },
        environment_links=result.environment_links,
        method=METHOD,
        declared_precision=precision_in_words(declared_precision(result.run_fingerprints.get("trainer"))),
        computed_at_us=computed_at_us,
    )


def causes_of_run(session: Session, run_id: str) -> list[findings.Finding]:
    """Return the causes named by the newest attributions of active steps, each with its newest sentence."""
    computed = tables.Attribution.computed_at_us.is_not(None)
    rows = newest_documents(session, run_id, MOST_STEPS, computed)
    read = [None if stored is None else parse(answers.AttributionDocument, stored) for _, stored in rows]
    found: list[tuple[int, list[findings.Finding]]] = []
    for place, document in enumerate(read):
        if document is not None:
            others = [*read[: min(place, DRIFT_STEPS)], *read[place + 1 :]][:DRIFT_STEPS]
            earlier = [other for other in reversed(others) if other is not None]
            # Exact divergences name no cause, so they are not read.
            causes = [each for each in attribution.conclude_attribution(document, earlier) if each.names_cause]
            found.append((document.step, [_finding(document, cause) for cause in causes]))
    return findings.newest_of_steps(found)


def _finding(document: answers.AttributionDocument, cause: conclusion.Conclusion) -> findings.Finding:
    link = next((link for link in document.links if link.name == cause.link), None)
    if cause.kind != "cause" or link is None:
        return findings.Finding(cause.kind, "info", _TITLES.get(cause.kind, cause.kind), cause.sentence)
    confidence = run_answers.ConfidenceRecord(share=link.share, low=link.share_low, high=link.share_high)
    return findings.Finding(link.name, "info", link.short_cause, cause.sentence, confidence=confidence)
