"""HTTP: the health of a run."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query

from foreshock.diagnosis.health import WINDOW_STEPS, conclude_health
from foreshock.model_kind import ModelKind
from foreshock_service.platform.context import Context
from foreshock_service.platform.security import Reader
from foreshock_service.runs.health import service
from foreshock_service.runs.health.schemas import HealthRead
from foreshock_service.runs.runs.addresses import RunIdentifier

router = APIRouter(prefix="/v1/runs/{run}", tags=["health"])


@router.get("/health")
def read_health(
    run: RunIdentifier,
    context: Context,
    principal: Reader,
    steps: Annotated[int, Query(ge=1, le=100, description="the newest measured steps to pool")] = WINDOW_STEPS,
    model_kind: Annotated[ModelKind | None, Query(description="judge as this kind; absent: the run's")] = None,
) -> HealthRead:
    """Return the mismatch pooled over the newest measured steps, its interval over prompts × steps, and the verdict."""
    with context.database.read() as session:
        evidence = service.health_evidence(session, principal, run, model_kind, steps)
    return HealthRead.nothing() if evidence is None else HealthRead.of(evidence, conclude_health(evidence))
