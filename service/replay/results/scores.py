"""Scores: the log-probs that a worker gave to a job's rollouts, which of them count for a step, and their files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import numpy as np
from fastapi import APIRouter, Path, Query, Request, Response, status
from numpy.typing import NDArray
from sqlalchemy.orm import Session

from foreshock.scorers import score_name
from foreshock_service.platform import parameters, security, uploads
from foreshock_service.platform.context import Context, ScoredShard
from foreshock_service.platform.database.tables.probes import Score, ScoreShard
from foreshock_service.platform.store.tokens import TokenStore, score_file_name
from foreshock_service.replay.leases.endpoints import LeaseIdentifier, LeaseToken, UploadReceipt
from foreshock_service.replay.probes import environments, jobs
from foreshock_service.replay.probes.schemas import ScorerName, VariantName
from foreshock_service.replay.results.files import ScoreFiles, environment_of, preferred_scores, read_aligned_scores
from foreshock_service.replay.results.shards import FileKind, ShardAddress, receive_shard
from foreshock_service.runs import attempts, events

router = APIRouter(prefix="/v1/leases", tags=["leases"])


SCORES = FileKind(
    name="scores",
    shards=ScoreShard,
    published=Score,
    columns=("scorer", "variant"),
    sides=("",),
    asked=lambda job: [(each["scorer"], each["variant"]) for each in jobs.scored_by(job)],
    title=lambda key: score_name(*key),
    file_name=score_file_name,
)


@router.put(
    "/{lease}/scores/{shard}",
    status_code=status.HTTP_201_CREATED,
    responses={200: {"model": UploadReceipt, "description": "The same bytes were stored before"}},
    openapi_extra=uploads.PARQUET_BODY,
)
async def put_scores(
    lease: LeaseIdentifier,
    shard: Annotated[int, Path(ge=0, le=parameters.LARGEST_STEP)],
    token: LeaseToken,
    scorer: Annotated[ScorerName, Query()],
    request: Request,
    context: Context,
    principal: security.Worker,
    response: Response,
    variant: Annotated[VariantName, Query()] = "",
) -> UploadReceipt:
    """Store one shard of a scorer's log-probs: 201 if it is new, 200 for the same bytes, 409 for other bytes."""
    address = ShardAddress(SCORES, lease, token, (scorer, variant), shard)
    return await receive_shard(request, response, context, principal, address)


def newest_scores(session: Session, key: events.StepKey) -> list[Score]:
    """Return the scores of a step, newest first: one for each scorer, variant and platform that it was made on."""
    found = SCORES.newest_of_step(
        session, key, lambda score: (score.scorer, score.variant, environment_of(score).platform)
    )
    return list(found.values())


def files_of_score(session: Session, store: TokenStore, score: Score) -> ScoreFiles:
    """Return the files that hold a score's log-probs."""
    files = tuple(store.file(shard.file) for shard in SCORES.shards_of(session, score))
    return ScoreFiles(score.scorer, score.variant, files, score.fingerprint)


def read_replayed_scores(session: Session, store: TokenStore, shard: ScoredShard) -> Mapping[str, NDArray[np.float32]]:
    """Return each replayed score of the step by name, [T] as the shard's response tokens; NaN for unscored rollouts.

    Of scores in several environments it is the one of the run's own, as in the attribution.
    """
    scores = newest_scores(session, events.StepKey(shard.run_id, shard.attempt, shard.step))
    if not scores:
        return {}
    found = {}
    attempt = attempts.find_attempt(session, shard.run_id, shard.attempt)
    run = environments.run_fingerprints(shard.batch.attributes, attempt.fingerprint if attempt is not None else {})
    for score in preferred_scores(scores, run):
        files = files_of_score(session, store, score)
        found[files.name] = read_aligned_scores(shard.batch, files.files)
    return found
