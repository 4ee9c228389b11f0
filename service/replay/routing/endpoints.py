"""HTTP: comparisons of routed experts."""

from __future__ import annotations

from fastapi import APIRouter, status

from foreshock_service.platform.context import Context
from foreshock_service.platform.schemas import ActiveOrAttempt, StepPath
from foreshock_service.platform.security import Reader, Worker
from foreshock_service.replay.leases.endpoints import LeaseIdentifier, LeaseToken
from foreshock_service.replay.routing import service
from foreshock_service.replay.routing.schemas import RoutingBody, RoutingStepRead
from foreshock_service.runs.runs.addresses import RunIdentifier

router = APIRouter(prefix="/v1")


@router.put("/leases/{lease}/routing", status_code=status.HTTP_204_NO_CONTENT, tags=["leases"])
def put_routing(
    lease: LeaseIdentifier, token: LeaseToken, body: RoutingBody, context: Context, principal: Worker
) -> None:
    """Store a comparison of routed experts; it counts when the job is complete."""
    service.store_routing(context, principal, lease, token, body)


@router.get("/runs/{run}/steps/{step}/routing", tags=["routing"])
def read_routing(
    run: RunIdentifier, step: StepPath, context: Context, principal: Reader, attempt: ActiveOrAttempt = None
) -> RoutingStepRead:
    """Return the newest comparison of routed experts of each pair of scorers at a step.

    404 `routing-not-found`: none is done; request a probe of the kind `routing`.
    """
    with context.database.read() as session:
        return service.read_routing(session, principal, run, step, attempt)
