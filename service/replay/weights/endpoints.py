"""HTTP: weights searches."""

from __future__ import annotations

from fastapi import APIRouter, status

from foreshock_service.platform.context import Context
from foreshock_service.platform.schemas import ActiveOrAttempt, StepPath
from foreshock_service.platform.security import Reader, Worker
from foreshock_service.replay.leases.endpoints import LeaseIdentifier, LeaseToken
from foreshock_service.replay.weights import service
from foreshock_service.replay.weights.schemas import WeightsSearchBody, WeightsSearchRead
from foreshock_service.runs.runs.addresses import RunIdentifier

router = APIRouter(prefix="/v1")


@router.put("/leases/{lease}/weights-search", status_code=status.HTTP_204_NO_CONTENT, tags=["leases"])
def put_search(
    lease: LeaseIdentifier, token: LeaseToken, body: WeightsSearchBody, context: Context, principal: Worker
) -> None:
    """Store the result of a weights search; it counts when the job is complete."""
    service.store_search(context, principal, lease, token, body)


@router.get("/runs/{run}/steps/{step}/weights-search", tags=["attribution"])
def read_search(
    run: RunIdentifier, step: StepPath, context: Context, principal: Reader, attempt: ActiveOrAttempt = None
) -> WeightsSearchRead:
    """Return the newest weights search of a step: which announced weights, or parts of them, give the logged log-probs.

    404 `weights-search-not-found`: none is done; request a probe of the kind `weights`.
    """
    with context.database.read() as session:
        return service.read_search(session, principal, run, step, attempt)
