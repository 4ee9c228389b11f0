"""One stored rollout with everything that was logged and scored of its tokens, for a page that shows it whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from foreshock.rollouts import RolloutBatch
from foreshock.rollouts.schema import ROLLOUT_COLUMNS
from foreshock_service.platform.context import ServiceContext
from foreshock_service.platform.security import Principal
from foreshock_service.runs.attempts.service import resolve_step
from foreshock_service.runs.coverage import coverage_of_step
from foreshock_service.runs.rollouts.service import token_files
from foreshock_service.runs.rollouts.tokens import find_rollout, rollout_not_found, scores_of
from foreshock_service.runs.runs.service import get_run

EVERY_COLUMN = tuple(column.name for column in ROLLOUT_COLUMNS)


@dataclass(frozen=True, slots=True)
class WholeRollout:
    """A batch of this one rollout, and the log-prob of each response token by scorer, [T], NaN if it is missing."""

    attempt: int
    batch: RolloutBatch
    scores: Mapping[str, NDArray[np.float32]]


def read_whole_rollout(
    context: ServiceContext, principal: Principal, run_id: str, step: int, sample_id: str
) -> WholeRollout:
    """Return a rollout of the active step. Raises RunNotFound, StepNotFound, RolloutNotFound, TokensPurged."""
    with context.database.read() as session:
        get_run(session, principal, run_id)
        key = resolve_step(session, run_id, step, None)
        found = find_rollout(context, key, token_files(session, key), sample_id, EVERY_COLUMN)
        if found is None:
            raise rollout_not_found(key, sample_id, coverage_of_step(session, key))
        _, batch = found
        return WholeRollout(key.attempt, batch, scores_of(context, session, key, batch))
