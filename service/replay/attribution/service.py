"""Attribution: computed when scores arrive, stored, and read; computed again where it was left out of date.

Scores are published in one transaction that also marks the step's attribution stale. What follows may be repeated or
lost: as long as the mark is there, the next reader or the sweeper computes it.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from sqlalchemy.orm import Session

from foreshock.clock import now_us
from service.platform.context import ServiceContext
from service.platform.database.tables.probes import Score
from service.platform.problem import ProblemError
from service.platform.security import Principal
from service.replay.attribution import repository
from service.replay.attribution.compute import ScoreFiles, StepFindings, compute_findings
from service.replay.attribution.schemas import AttributionRead, ScoreSource
from service.replay.events import ScoresPublished
from service.replay.probes.service import pinned_rollouts
from service.replay.scores import repository as scores
from service.replay.scores.replayed import PinnedRollouts
from service.runs.attempts.service import attempts_of_run, resolve_step
from service.runs.events import MeasurementsChanged
from service.runs.measurements.service import store_measurement
from service.runs.rollouts.service import shards_of_step
from service.runs.runs.service import get_run, lock_run_for_background
from service.runs.step_key import StepKey
from service.runs.steps.service import find_step, is_closed

_logger = logging.getLogger(__name__)
_TRIES = 5
_LEFT_AFTER_US = 30_000_000
_COMPUTED_AT_ONCE = 10


class AttributionNotFound(ProblemError):
    """Nothing was replayed of this step, so nothing says where its mismatch comes from."""

    status = 404


@dataclass(frozen=True, slots=True)
class ScoredStep:
    """What a step's attribution is computed from: the files of its rollouts and of the scores that count.

    `version` tells one set of scores from another.
    """

    version: str
    rollouts: PinnedRollouts
    scores: tuple[ScoreFiles, ...]


def read_attribution(
    context: ServiceContext, principal: Principal, run_id: str, step: int, attempt: int | None
) -> AttributionRead:
    """Where the step's mismatch comes from; raises AttributionNotFound until a probe of it is done."""
    with context.database.read() as session:
        get_run(session, principal, run_id)
        key = resolve_step(session, run_id, step, attempt)
        is_stale = repository.is_stale(session, *key) or _has_late_rollouts(session, key)
    if is_stale:
        compute_attribution(context, key)
    with context.database.read() as session:
        document = repository.document_of(session, *key)
    if document is None:
        raise AttributionNotFound(
            f"step {step} of attempt {key.attempt} was not replayed: ask for a probe with POST /v1/runs/{run_id}/probes"
        )
    return AttributionRead.model_validate(document)


def newest_replayed_steps(session: Session, principal: Principal, run_id: str, limit: int) -> Sequence[int]:
    """Up to `limit` active steps that have replayed scores, the newest first."""
    get_run(session, principal, run_id)
    return repository.newest_steps(session, run_id, attempts_of_run(session, run_id), limit)


def compute_attribution(context: ServiceContext, key: StepKey) -> None:
    """Compute and store the step's attribution and the measurements of its replayed scores.

    Where scores arrive meanwhile it starts over, so that what is stored is of the scores that are there.
    """
    for _ in range(_TRIES):
        with context.database.read() as session:
            scored = scored_step(context, session, key)
        if not scored.scores:
            return
        findings = context.decoders.run(compute_findings, scored.rollouts, scored.scores)
        if context.database.write(partial(_store, context, key, scored.version, findings)):
            return


def scored_step(context: ServiceContext, session: Session, key: StepKey) -> ScoredStep:
    """The step as its newest scores see it; without scores nothing was replayed of it."""
    chosen = newest_scores(session, key)
    return ScoredStep(
        _version(chosen),
        pinned_rollouts(context, shards_of_step(session, key), None),
        tuple(_files(context, session, score) for score in chosen),
    )


def try_to_compute(context: ServiceContext, key: StepKey) -> bool:
    """Compute it, or log why not and leave it to a later try: the scores are stored either way. Whether it was done."""
    try:
        compute_attribution(context, key)
        return True
    except Exception:
        _logger.exception("the attribution of step %s of run %s failed; it is tried again", key.step, key.run_id)
        context.database.write(lambda session: repository.mark_stale(session, *key, now_us()))
        return False


def mark_attribution_stale(session: Session, published: ScoresPublished) -> None:
    """Mark the step's attribution as out of date, in the transaction that publishes its scores."""
    repository.mark_stale(session, published.run_id, published.attempt, published.step, published.at_us)


def compute_left_over(context: ServiceContext) -> int:
    """Compute what a crash or a failure left out of date; how many steps. For the sweeper."""
    with context.database.read() as session:
        left = repository.left_stale(session, now_us() - _LEFT_AFTER_US, _COMPUTED_AT_ONCE)
    return sum(try_to_compute(context, key) for key in left)


def store_findings(session: Session, key: StepKey, version: str, findings: StepFindings) -> bool:
    """Store what was computed of the scores of `version`; False where others count by now. The run is locked."""
    chosen = newest_scores(session, key)
    if _version(chosen) != version:
        return False
    now = now_us()
    document = None
    if findings.attribution is not None:
        sources = [_source(score) for score in chosen]
        document = AttributionRead.of(
            key, findings.attribution, findings.floors, findings.of_rollouts, sources, now
        ).model_dump(mode="json")
    repository.put(session, *key, document, now)
    for each in findings.comparisons:
        store_measurement(session, key, each.folded, from_sample=each.from_sample)
    session.flush()
    return True


def _store(context: ServiceContext, key: StepKey, version: str, findings: StepFindings, session: Session) -> bool:
    if lock_run_for_background(session, key.run_id) is None:
        return True
    if not store_findings(session, key, version, findings):
        return False
    if is_closed(session, key):
        context.events.publish(session, MeasurementsChanged(*key))
    return True


def _has_late_rollouts(session: Session, key: StepKey) -> bool:
    """Whether rollouts came after it was computed: how many of the step took part is another number then."""
    document, found = repository.document_of(session, *key), find_step(session, key)
    return document is not None and found is not None and document["of_rollouts"] != found.rollouts


def newest_scores(session: Session, key: StepKey) -> list[Score]:
    """One score for each scorer and variant of a step: made as the newest one was, of the most rollouts.

    A later sample never hides the whole that was scored in the same way.
    """
    chosen: dict[tuple[str, str], Score] = {}
    for score in scores.of_step(session, *key):
        best = chosen.setdefault((score.scorer, score.variant), score)
        if score.fingerprint_digest == best.fingerprint_digest and score.rollouts > best.rollouts:
            chosen[score.scorer, score.variant] = score
    return [chosen[key] for key in sorted(chosen)]


def _version(chosen: Sequence[Score]) -> str:
    """What tells one set of scores from another."""
    text = "\n".join(f"{score.scorer} {score.variant} {score.job_id} {score.token}" for score in chosen)
    return hashlib.sha256(text.encode()).hexdigest()


def _files(context: ServiceContext, session: Session, score: Score) -> ScoreFiles:
    shards = scores.shards_of_score(session, score)
    return ScoreFiles(score.scorer, score.variant, tuple(context.store.path_of(shard.file) for shard in shards))


def _source(score: Score) -> ScoreSource:
    return ScoreSource(
        scorer=score.scorer,
        variant=score.variant,
        fingerprint_digest=score.fingerprint_digest,
        fingerprint=score.fingerprint,
        accelerator=score.accelerator,
        device_name=score.device_name,
        rollouts=score.rollouts,
    )
