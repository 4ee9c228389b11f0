"""HTTP: attribution."""

from __future__ import annotations

from fastapi import APIRouter

from foreshock_service.platform.context import Context
from foreshock_service.platform.schemas import ActiveOrAttempt, StepPath
from foreshock_service.platform.security import Reader
from foreshock_service.replay.attribution import service
from foreshock_service.replay.attribution.schemas import AttributionRead
from foreshock_service.runs.runs.addresses import RunIdentifier
from foreshock_service.runs.shard_counts import with_shards

router = APIRouter(prefix="/v1/runs/{run}/steps/{step}", tags=["attribution"])


@router.get("/attribution")
def read_attribution(
    run: RunIdentifier, step: StepPath, context: Context, principal: Reader, attempt: ActiveOrAttempt = None
) -> AttributionRead:
    """Return the causes of the step's mismatch: the links of the chain with their shares, and the noise floors.

    404 `attribution-not-found`: no scores of the step are published; request a probe. 404 `attribution-not-possible`:
    the published scores are fewer than two of the chain. 503 `attribution-pending` with Retry-After: scores are
    published and the first attribution is being computed. `stale: true`: scores or rollouts arrived since, and a new
    attribution is being computed.
    """
    with context.database.read() as session:
        found = service.read_attribution(session, principal, run, step, attempt)
        return with_shards(session, run, step, attempt, found)
