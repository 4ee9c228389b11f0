"""Published scores lined up with a shard of rollouts, for whoever shows tokens."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray
from sqlalchemy.orm import Session

from foreshock.scorers import score_name
from service.platform.context import ScoredShard
from service.platform.store.tokens import TokenStore
from service.replay.attribution.compute import align, read_all
from service.replay.attribution.service import newest_scores
from service.replay.scores import repository
from service.runs.step_key import StepKey


def read_replayed_scores(session: Session, store: TokenStore, shard: ScoredShard) -> Mapping[str, NDArray[np.float32]]:
    """Each replayed score of the step, [T] as the shard's response tokens; NaN where a rollout was not scored."""
    found = {}
    for score in newest_scores(session, StepKey(shard.run_id, shard.attempt, shard.step)):
        files = [store.path_of(each.file) for each in repository.shards_of_score(session, score)]
        found[score_name(score.scorer, score.variant)] = align(shard.batch, read_all(files))
    return found
