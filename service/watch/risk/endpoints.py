"""HTTP: the risk of a run."""

from __future__ import annotations

from fastapi import APIRouter

from foreshock_service.platform.context import Context
from foreshock_service.platform.security import Reader
from foreshock_service.runs.runs.addresses import RunIdentifier
from foreshock_service.watch.risk import service
from foreshock_service.watch.risk.schemas import RiskRead

router = APIRouter(prefix="/v1/runs/{run}/risk", tags=["alerts"])


@router.get("")
def read_risk(run: RunIdentifier, context: Context, principal: Reader) -> RiskRead:
    """Return an ordinal level, calm to critical, with its reasons: the alerts that stand, by family."""
    with context.database.read() as session:
        return service.read_risk(session, principal, run)
