"""Published scores: which of them count for a step, and their log-probs beside the tokens of a shard."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray
from sqlalchemy.orm import Session

from service.platform.context import ScoredShard
from service.platform.database.tables.probes import Score
from service.platform.store.tokens import TokenStore
from service.replay.scores import repository
from service.replay.scores.files import ScoreFiles, read_aligned_scores
from service.runs.step_key import StepKey


def newest_scores(session: Session, key: StepKey) -> list[Score]:
    """Return one score for each scorer and variant of a step: with the newest fingerprint, of the most rollouts.

    A later sample never hides the score of all rollouts that has the same fingerprint.
    """
    chosen: dict[tuple[str, str], Score] = {}
    for score in repository.of_step(session, *key):
        best = chosen.setdefault((score.scorer, score.variant), score)
        if score.fingerprint_digest == best.fingerprint_digest and score.rollouts > best.rollouts:
            chosen[score.scorer, score.variant] = score
    return [chosen[key] for key in sorted(chosen)]


def files_of_score(session: Session, store: TokenStore, score: Score) -> ScoreFiles:
    """Return the files that hold a score's log-probs."""
    shards = repository.shards_of_score(session, score)
    return ScoreFiles(score.scorer, score.variant, tuple(store.path_of(shard.file) for shard in shards))


def read_replayed_scores(session: Session, store: TokenStore, shard: ScoredShard) -> Mapping[str, NDArray[np.float32]]:
    """Return each replayed score of the step by name, [T] as the shard's response tokens; NaN for unscored rollouts."""
    found = {}
    for score in newest_scores(session, StepKey(shard.run_id, shard.attempt, shard.step)):
        files = files_of_score(session, store, score)
        found[files.name] = read_aligned_scores(shard.batch, files.files)
    return found
