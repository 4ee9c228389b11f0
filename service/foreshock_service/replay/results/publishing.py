"""The table of kinds of results, and their publication: all results of a job are published at once, on completion.

Scores are the log-probs that a worker gave to a job's rollouts.
"""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from fastapi import Query, Request, Response, status
from numpy.typing import NDArray
from sqlalchemy.orm import Session

from foreshock import probe_kinds, scorers
from foreshock_service.platform import parameters, security, uploads
from foreshock_service.platform.context import Context, ScoredShard, ServiceContext
from foreshock_service.platform.database.engine import database_now_us
from foreshock_service.platform.database.tables import Score, ScoreFile
from foreshock_service.platform.store.tokens import TokenStore
from foreshock_service.replay.leases import endpoints, service
from foreshock_service.replay.probes import environments, jobs, schemas
from foreshock_service.replay.results import documents, exact, file_results, vocabulary
from foreshock_service.replay.results.files import StoredScore, environment_of, preferred_scores, read_aligned_scores
from foreshock_service.runs import attempts, events

router = parameters.api_router()
# As routes, not as a router: FastAPI 0.165 keeps included routers apart, and `api_routes` has each route.
router.routes.extend([*exact.router.routes, *vocabulary.router.routes])


SCORES = file_results.FileKind(
    name="scores",
    stored=ScoreFile,
    published=Score,
    columns=("scorer", "variant"),
    sides=("",),
    asked=lambda job: [(each["scorer"], each["variant"]) for each in jobs.scored_by(job)],
    title=lambda key: scorers.score_name(*key),
)


@router.put(
    "/v1/leases/{lease}/scores",
    tags=["leases"],
    status_code=status.HTTP_201_CREATED,
    responses={200: {"model": endpoints.UploadReceipt, "description": "The same bytes were stored before"}},
    openapi_extra=uploads.PARQUET_BODY,
)
async def put_scores(
    lease: endpoints.LeaseIdentifier,
    token: endpoints.LeaseToken,
    scorer: Annotated[schemas.ScorerName, Query()],
    request: Request,
    context: Context,
    principal: security.Worker,
    response: Response,
    variant: Annotated[schemas.VariantName, Query()] = "",
) -> endpoints.UploadReceipt:
    """Store a scorer's log-probs: 201 if they are new, 200 for the same bytes, 409 for other bytes."""
    address = file_results.FileAddress(SCORES, lease, token, (scorer, variant))
    return await file_results.receive_file(request, response, context, principal, address)


def newest_scores(session: Session, key: events.StepKey) -> list[Score]:
    """Return the scores of a step, newest first: one for each scorer, variant and platform."""
    found = SCORES.newest_of_step(
        session, key, lambda score: (score.scorer, score.variant, environment_of(score).platform)
    )
    return list(found.values())


def stored_score(session: Session, store: TokenStore, score: Score) -> StoredScore | None:
    """Return a score with its file; None if retention has purged the file."""
    file = SCORES.file_of(session, store, score)
    return None if file is None else StoredScore(score.scorer, score.variant, file, score.fingerprint)


def read_replayed_scores(session: Session, store: TokenStore, shard: ScoredShard) -> Mapping[str, NDArray[np.float32]]:
    """Return each replayed score of the step by name, [T] as the shard's response tokens; NaN for unscored rollouts.

    Of scores in several environments it takes the one nearest to the run's own environment, as the attribution does.
    """
    scores = newest_scores(session, events.StepKey(shard.run_id, shard.attempt, shard.step))
    if not scores:
        return {}
    found = {}
    attempt = attempts.find_attempt(session, shard.run_id, shard.attempt)
    run = environments.run_fingerprints(shard.batch.attributes, attempt.fingerprint if attempt is not None else {})
    for score in preferred_scores(scores, run):
        stored = stored_score(session, store, score)
        if stored is not None:
            found[stored.name] = read_aligned_scores(shard.batch, stored.file)
    return found


@dataclass(frozen=True, slots=True)
class ScoresPublished(events.StepEvent):
    """A job is complete and its scores of the step are published; `at_us` is the database's time.

    The event is sent in the transaction that publishes the scores, without a lock of the run.
    """

    at_us: int


DOCUMENTS: dict[str, documents.DocumentKind[Any]] = {}
"""The kinds of results that are documents, by kind of probe; the results of `SCORES` and `EXACT` are files."""
for each in probe_kinds.PROBE_KINDS.values():
    if each.document:
        # The module has the name that ends the document's addresses.
        module = importlib.import_module(f"{__package__}.{each.document.replace('-', '_')}")
        DOCUMENTS[each.name] = module.KIND
        router.routes.extend(module.router.routes)


@router.post("/v1/leases/{lease}/complete", status_code=status.HTTP_204_NO_CONTENT, tags=["leases"])
def complete(
    lease: endpoints.LeaseIdentifier, body: endpoints.TokenBody, context: Context, principal: security.Worker
) -> None:
    """Publish the job's scores. The answer comes after the step's attribution was computed with them."""
    measured = exact.measure_job(context, principal, lease, body.token)
    context.database.write(lambda session: publish_job(session, context, principal, lease, body.token, measured))


def publish_job(
    session: Session,
    context: ServiceContext,
    principal: security.Principal,
    lease_id: str,
    token: int,
    measured: Mapping[file_results.Key, Any],
) -> None:
    """Publish the job's results and end the job; does nothing if this try has already published them.

    `measured` are the measures of the exact pairs. Raises LeaseNotFound, LeaseLost unless the token is the newest, and
    ResultIncomplete if results are missing.
    """
    lease, job, probe = service.lock_lease(session, principal, lease_id)
    if service.is_completed(lease, token):
        return
    service.check_held(lease, job, token)
    now = database_now_us(session)
    exact.EXACT.publish(session, lease, job, probe, now, measured)
    if probe.kind in DOCUMENTS:
        DOCUMENTS[probe.kind].publish(session, job, probe, token, now)
    if SCORES.publish(session, lease, job, probe, now):
        context.events.publish(session, ScoresPublished(probe.run_id, probe.attempt, probe.step, now))
    jobs.complete(job, lease, now)
