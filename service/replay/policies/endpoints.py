"""HTTP: the policy of a run's automatic probes."""

from __future__ import annotations

from fastapi import APIRouter

from foreshock_service.platform.context import Context
from foreshock_service.platform.security import Administrator, Reader
from foreshock_service.replay.policies import service
from foreshock_service.replay.policies.schemas import ProbePolicyBody, ProbePolicyRead
from foreshock_service.runs.runs.addresses import RunIdentifier

router = APIRouter(prefix="/v1/runs/{run}/probe-policy", tags=["probes"])


@router.get("")
def read_probe_policy(run: RunIdentifier, context: Context, principal: Reader) -> ProbePolicyRead:
    """Return which steps of the run are probed automatically, and what its probes have cost."""
    with context.database.read() as session:
        return service.read_policy(session, principal, run)


@router.put("")
def set_probe_policy(
    run: RunIdentifier, body: ProbePolicyBody, context: Context, principal: Administrator
) -> ProbePolicyRead:
    """Set which steps are probed automatically and with which budget; fields left out get their defaults."""
    context.database.write(lambda session: service.set_policy(session, principal, run, body))
    with context.database.read() as session:
        return service.read_policy(session, principal, run)
