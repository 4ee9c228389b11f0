"""HTTP: the configuration matrix of a step."""

from __future__ import annotations

from fastapi import APIRouter

from foreshock_service.platform.context import Context
from foreshock_service.platform.schemas import ActiveOrAttempt, StepPath
from foreshock_service.platform.security import Reader
from foreshock_service.replay.matrix import service
from foreshock_service.replay.matrix.schemas import MatrixRead
from foreshock_service.runs.runs.addresses import RunIdentifier

router = APIRouter(prefix="/v1", tags=["probes"])


@router.get("/runs/{run}/steps/{step}/matrix")
def read_matrix(
    run: RunIdentifier, step: StepPath, context: Context, principal: Reader, attempt: ActiveOrAttempt = None
) -> MatrixRead:
    """Return hardware × configuration of a step: mismatch and cost of each cell, and what is recommended.

    The cells are probes of the kind `matrix`; 404 `matrix-not-found` if none was requested.
    """
    return service.read_matrix(context, principal, run, step, attempt)
