"""Attribution: compute it when scores are published, store it, and read it.

The transaction that publishes scores marks the step's attribution as stale and wakes the worker of the process, which
computes it, and every few seconds what else is stale: after a crash, or if late rollouts arrived. A read computes only
the conclusions, from the stored document.
"""

import contextlib
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from sqlalchemy import select, update
from sqlalchemy.orm import Session

from foreshock import clock, scorers
from foreshock.api.attribution import AttributionDocument, AttributionRecord, ConclusionRecord, ScoreSourceRecord
from foreshock.api.records import from_attributes, parse, to_json
from foreshock.diagnosis.attribution import conclude_attribution
from foreshock_service.platform import parameters, problem, security
from foreshock_service.platform.context import ServiceContext
from foreshock_service.platform.database import engine, tables
from foreshock_service.platform.database.session import after_commit
from foreshock_service.platform.jobs import Job, JobRunner
from foreshock_service.replay.attribution import compute
from foreshock_service.replay.attribution import document as documents
from foreshock_service.replay.probes import pinned_rollouts, service
from foreshock_service.replay.results import files, publishing
from foreshock_service.replay.results.documents import exact_of_step
from foreshock_service.replay.results.scores import newest_scores, stored_score
from foreshock_service.runs import attempts, due, events, measurements, runs, steps
from foreshock_service.runs.failing_runs import RunIsolated
from foreshock_service.runs.shards import shards_with_tokens

router = parameters.api_router(prefix="/v1/runs/{run}/steps/{step}", tags=["attribution"])

_TRIES = 5
_AGAIN_AFTER_US = 30_000_000
"""A computation that failed is repeated after this time."""

_RETRY_AFTER_SECONDS = 5


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
    rollouts: pinned_rollouts.PinnedRollouts
    scores: tuple[files.StoredScore, ...]
    attempt_fingerprint: dict[str, Any]


@router.get("/attribution")
def read_attribution(asked: attempts.StepOfRequest) -> AttributionRecord:
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
) -> AttributionRecord:
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
        return _read(session, run, parse(AttributionDocument, found.document), found.stale)
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


def _read(session: Session, run: tables.Run, document: AttributionDocument, stale: bool) -> AttributionRecord:
    """Return the document with its conclusions, which also use the attributions of the run's other probed steps."""
    others = documents.newest_documents(
        session, run.id, documents.DRIFT_STEPS,
        tables.Attribution.step != document.step, tables.Attribution.computed_at_us.is_not(None),
    )  # fmt: skip
    found = exact_of_step(session, events.StepKey(run.id, document.attempt, document.step))
    exact = tuple(documents.exact_of_link(each, document.scores) for each in found)
    earlier = [parse(AttributionDocument, each) for _, each in reversed(others) if each is not None]
    conclusions = conclude_attribution(document, earlier, exact)
    return from_attributes(
        AttributionRecord,
        document,
        stale=stale,
        exact=exact,
        conclusions=tuple(from_attributes(ConclusionRecord, each) for each in conclusions),
        incomplete=None,
    )


def newest_replayed_steps(session: Session, principal: security.Principal, run_id: str, limit: int) -> Sequence[int]:
    """Return up to `limit` active steps that have replayed scores, the newest first."""
    runs.get_run(session, principal, run_id)
    return [key.step for key, _ in documents.newest_documents(session, run_id, limit)]


def mark_attribution_stale(session: Session, published: publishing.ScoresPublished) -> None:
    """Mark the step's attribution as stale, in the transaction that publishes its scores."""
    documents.mark_stale(session, published.key, published.at_us)


def mark_stale_after_late_rollouts(session: Session, closed: events.StepClosed) -> None:
    """Mark the attribution of a step as stale if it has one: rollouts arrived after its scores were published."""
    if session.get(tables.Attribution, tuple(closed.key)) is not None:
        documents.mark_stale(session, closed.key, clock.now_us())


class Attributing(JobRunner):
    """The worker that computes stale attributions; published scores wake it."""

    def __init__(self, context: ServiceContext) -> None:
        job = Job("compute_stale_attributions", partial(compute_stale_attributions, context))
        super().__init__("attribution", context.database, [job], context.settings.sweep_interval_seconds)
        context.events.subscribe(publishing.ScoresPublished, lambda session, _: after_commit(session, self.wake))


def compute_stale_attributions(context: ServiceContext) -> int:
    """Compute the attributions that are stale, and return their number."""
    with context.database.read() as session:
        stale = documents.stale_until(session, clock.now_us())
    return sum(try_to_compute(context, key) for key in stale if not context.stopping.is_set())


def try_to_compute(context: ServiceContext, key: events.StepKey) -> bool:
    """Compute the step's attribution and return True; on an error it stays stale, for another try later."""
    with RunIsolated(context.database, context.events, key.run_id, f"attribute the mismatch of its step {key.step}"):
        try:
            compute_attribution(context, key)
            return True
        except Exception:
            context.database.write(lambda session: documents.mark_stale(session, key, clock.now_us() + _AGAIN_AFTER_US))
            raise
    return False


def compute_attribution(context: ServiceContext, key: events.StepKey) -> None:
    """Compute and store the step's attribution and the measurements of its replayed scores.

    Starts again if scores or rollouts arrive meanwhile; after five attempts the attribution stays stale. If the tokens
    or scores were purged or deleted, the stored attribution stays unchanged, and is not stale any more.
    """
    settled = update(tables.Attribution).filter_by(**key._asdict()).values(stale=False)
    for _ in range(_TRIES):
        inputs = None
        with context.database.read() as session, contextlib.suppress(problem.TokensPurged):
            inputs = attribution_inputs(context, session, key)
        if inputs is None or not inputs.scores:
            context.database.write(lambda session: session.execute(settled))
            return
        result = context.decoders.run(
            compute.attribute_step, inputs.rollouts, inputs.scores, inputs.attempt_fingerprint
        )
        if context.database.write(partial(_store_and_publish, context, key, inputs.version, result)):
            return


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
            from_attributes(ScoreSourceRecord, score)
            for score in newest_scores(session, key)
            if (score.scorer, score.variant, score.fingerprint) in used
        ]
        document = documents.document_of(key, result.attribution, result, sources, now)
    found = None if document is None else to_json(document)
    row = {**key._asdict(), "stale": False, "changed_at_us": now, "document": found, "computed_at_us": now}
    engine.upsert(session, tables.Attribution, [row], events.StepKey._fields)
    due.mark(session, key.run_id, source="attribution")
    measurements.store_measurements(session, key, result.comparisons)
    session.flush()
    return True


def _store_and_publish(
    context: ServiceContext, key: events.StepKey, version: str, result: compute.AttributionResult, session: Session
) -> bool:
    if runs.lock_run_for_background(session, key.run_id) is None:
        return True
    if not store_attribution(context, session, key, version, result):
        return False
    if steps.is_closed(session, key):
        steps.mark_step(session, key)
    return True
