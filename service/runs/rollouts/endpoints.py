"""HTTP: single tokens of stored rollouts. Uploads are in `service/runs/ingest`."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query

from foreshock.comparisons import TRAINER_ROLLOUT
from service.platform.context import Context
from service.platform.schemas import ActiveOrAttempt, StepPath
from service.platform.security import Reader
from service.runs.measurements.endpoints import Comparison
from service.runs.rollouts import tokens
from service.runs.rollouts.schemas import TokensRead
from service.runs.runs.addresses import RunIdentifier
from service.runs.shard_counts import with_shards

router = APIRouter(prefix="/v1/runs/{run}/steps/{step}", tags=["rollouts"])


@router.get("/tokens")
def read_tokens(
    run: RunIdentifier,
    step: StepPath,
    context: Context,
    principal: Reader,
    comparison: Comparison = TRAINER_ROLLOUT,
    worst: Annotated[int, Query(ge=1, le=1000, description="number of tokens, largest |d| first")] = 20,
    sample_id: Annotated[
        str | None, Query(max_length=1024, description="return all tokens of this rollout instead")
    ] = None,
    attempt: ActiveOrAttempt = None,
) -> TokensRead:
    """Return the worst tokens of a step, or one rollout token by token, with each scorer's log-prob."""
    query = tokens.TokenQuery(run, step, attempt, comparison, worst, sample_id)
    found = tokens.read_tokens(context, principal, query)
    with context.database.read() as session:
        return with_shards(session, run, step, attempt, found)
