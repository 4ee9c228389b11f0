"""HTTP: attribution."""

from __future__ import annotations

from fastapi import APIRouter

from service.platform.context import Context
from service.platform.schemas import ActiveOrAttempt, RunIdentifier, StepPath
from service.platform.security import Reader
from service.replay.attribution import service
from service.replay.attribution.schemas import AttributionRead

router = APIRouter(prefix="/v1/runs/{run}/steps/{step}", tags=["attribution"])


@router.get("/attribution")
def read_attribution(
    run: RunIdentifier, step: StepPath, context: Context, principal: Reader, attempt: ActiveOrAttempt = None
) -> AttributionRead:
    """Where the step's mismatch comes from: the links of the chain, their shares, and the noise floors beside them."""
    return service.read_attribution(context, principal, run, step, attempt)
