"""Published scores: which of them count for a step, and their log-probs beside the tokens of a shard."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray
from sqlalchemy.orm import Session

from foreshock_service.platform.context import ScoredShard
from foreshock_service.platform.database.tables.probes import Score
from foreshock_service.platform.store.tokens import TokenStore
from foreshock_service.replay.probes.job_environments import run_fingerprints
from foreshock_service.replay.scores import repository
from foreshock_service.replay.scores.files import ScoreFiles, read_aligned_scores
from foreshock_service.replay.scores.preferred import environment_of, preferred_scores
from foreshock_service.runs.attempts.service import find_attempt
from foreshock_service.runs.step_key import StepKey


def newest_scores(session: Session, key: StepKey) -> list[Score]:
    """Return the scores of a step, newest first: one for each scorer, variant and platform that it was made on.

    Of each, the newest fingerprint counts, with the most rollouts: a later sample never hides the score of all rollouts
    that has the same fingerprint.
    """
    chosen: dict[tuple[object, ...], Score] = {}
    for score in repository.of_step(session, *key):
        place = (score.scorer, score.variant, environment_of(score).platform)
        best = chosen.setdefault(place, score)
        if score.fingerprint_digest == best.fingerprint_digest and score.rollouts > best.rollouts:
            chosen[place] = score
    return list(chosen.values())


def files_of_score(session: Session, store: TokenStore, score: Score) -> ScoreFiles:
    """Return the files that hold a score's log-probs."""
    shards = repository.shards_of_score(session, score)
    files = tuple(store.file(shard.file) for shard in shards)
    return ScoreFiles(score.scorer, score.variant, files, score.fingerprint)


def read_replayed_scores(session: Session, store: TokenStore, shard: ScoredShard) -> Mapping[str, NDArray[np.float32]]:
    """Return each replayed score of the step by name, [T] as the shard's response tokens; NaN for unscored rollouts.

    Of scores in several environments it is the one of the run's own, as in the attribution.
    """
    if not repository.any_of_step(session, shard.run_id, shard.attempt, shard.step):
        return {}
    found = {}
    attempt = find_attempt(session, shard.run_id, shard.attempt)
    run = run_fingerprints(shard.batch.attributes, attempt.fingerprint if attempt is not None else {})
    scores = newest_scores(session, StepKey(shard.run_id, shard.attempt, shard.step))
    for score in preferred_scores(scores, run):
        files = files_of_score(session, store, score)
        found[files.name] = read_aligned_scores(shard.batch, files.files)
    return found
