"""HTTP: attribution."""

from __future__ import annotations

from fastapi import APIRouter

from service.attribution import service
from service.attribution.schemas import AttributionRead
from service.context import Context
from service.schemas import RunIdentifier, StepPath, SurvivingOrAttempt
from service.security import Reader

router = APIRouter(prefix="/v1/runs/{run}/steps/{step}", tags=["attribution"])


@router.get("/attribution")
def read_attribution(
    run: RunIdentifier, step: StepPath, context: Context, principal: Reader, attempt: SurvivingOrAttempt = None
) -> AttributionRead:
    """Where the step's mismatch comes from: the links of the chain, their shares, and the noise floors beside them."""
    return service.read_attribution(context, principal, run, step, attempt)
