"""Measurements of updates: how far a step's update moved the policy, compared with the scorer's noise."""

from fastapi import status

from foreshock import probe_kinds
from foreshock.api.records import parse
from foreshock.diagnosis.update_noise import UpdateToNoise
from foreshock_service.platform import parameters, security
from foreshock_service.platform.context import Context
from foreshock_service.platform.database.tables import Probe, ProbeJob
from foreshock_service.replay.leases.endpoints import LeaseIdentifier, LeaseToken
from foreshock_service.replay.results.documents import DocumentKind, foreign_weights
from foreshock_service.runs.attempts import StepOfRequest

router = parameters.api_router(prefix="/v1")


def _check(body: UpdateToNoise, job: ProbeJob, probe: Probe) -> str | None:
    (after,) = probe.candidates or [{}]
    expected = (probe.step, after.get("step"), job.scorers[0]["scorer"])
    if (body.step, body.after_step, body.scorer) != expected:
        return f"got steps {body.step} and {body.after_step} of {body.scorer}, expected {expected}"
    return foreign_weights((body.before_fingerprint,), probe)


KIND = DocumentKind(probe=probe_kinds.UPDATE, noun="measurement of an update", check=_check)


@router.put("/leases/{lease}/update", status_code=status.HTTP_204_NO_CONTENT, tags=["leases"])
def put_update(
    lease: LeaseIdentifier, token: LeaseToken, body: UpdateToNoise, context: Context, principal: security.Worker
) -> None:
    """Store the measurement of an update; it counts when the job is complete."""
    KIND.store(context, principal, lease, token, body)


@router.get("/runs/{run}/steps/{step}/update", tags=["update"])
def read_update(asked: StepOfRequest) -> UpdateToNoise:
    """Return the newest measurement of the step's update; 404 `result-not-found`: none is done."""
    _, ((row, _),) = KIND.of_step(asked, 1)
    return parse(UpdateToNoise, row.document)
