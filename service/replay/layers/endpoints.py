"""HTTP: comparisons by layer."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, status

from foreshock_service.platform.context import Context
from foreshock_service.platform.schemas import ActiveOrAttempt, StepPath
from foreshock_service.platform.security import Reader, Worker
from foreshock_service.replay.layers import service
from foreshock_service.replay.layers.schemas import LayersBody, LayersStepRead
from foreshock_service.replay.leases.endpoints import LeaseIdentifier, LeaseToken
from foreshock_service.replay.probes.schemas import PairKey
from foreshock_service.runs.runs.addresses import RunIdentifier

router = APIRouter(prefix="/v1")


@router.put("/leases/{lease}/layers", status_code=status.HTTP_204_NO_CONTENT, tags=["leases"])
def put_layers(
    lease: LeaseIdentifier, token: LeaseToken, body: LayersBody, context: Context, principal: Worker
) -> None:
    """Store a comparison by layer; it counts when the job is complete."""
    service.store_layers(context, principal, lease, token, body)


@router.get("/runs/{run}/steps/{step}/layers", tags=["layers"])
def read_layers(
    run: RunIdentifier,
    step: StepPath,
    context: Context,
    principal: Reader,
    attempt: ActiveOrAttempt = None,
    pair: Annotated[PairKey | None, Query(description="`compared/reference`; absent: the newest pairs")] = None,
) -> LayersStepRead:
    """Return the newest comparison by layer of each pair at a step: where in the network two scorers depart.

    404 `layers-not-found`: none is done; request a probe of the kind `layers`.
    """
    with context.database.read() as session:
        return service.read_layers(session, principal, run, step, attempt, pair)
