"""Comparisons of the routed experts of two scorers of a mixture of experts."""

from __future__ import annotations

from fastapi import APIRouter, status

from foreshock.comparisons import comparison_name
from foreshock.probe_kinds import ROUTING as ROUTING_PROBE
from foreshock.scorers import score_name
from foreshock_service.platform.context import Context
from foreshock_service.platform.database.tables.probes import Probe, ProbeJob, StoredRouting
from foreshock_service.platform.parameters import ActiveOrAttempt, StepPath
from foreshock_service.platform.problem import ProblemError
from foreshock_service.platform.security import Reader, Worker
from foreshock_service.replay.leases.endpoints import LeaseIdentifier, LeaseToken
from foreshock_service.replay.results.documents import DocumentKind, foreign_weights, newest_by_pair, visible_step
from foreshock_service.replay.results.routing_schemas import RoutingBody, RoutingRead, RoutingStepRead
from foreshock_service.runs.run_endpoints import RunIdentifier

router = APIRouter(prefix="/v1")

_SIZE = ("rollouts", "tokens", "from_sample")
# Comparisons of a step that are read, newest first, and pairs that are shown.
_MOST_READ, _MOST_PAIRS = 64, 16


class RoutingNotFound(ProblemError):
    """No routed experts of this step are compared: request a probe of the kind `routing`."""

    status = 404
    problem_type = "routing-not-found"


class RoutingMissing(ProblemError):
    """The job compares routed experts and its result was not sent."""

    status = 409
    problem_type = "routing-missing"


class NoRouting(ProblemError):
    """The job compares no routed experts, or the result is of other scorers or weights than the job."""

    status = 422
    problem_type = "no-routing"


def _check(body: RoutingBody, job: ProbeJob, probe: Probe) -> str | None:
    asked = [score_name(each["scorer"], each["variant"]) for each in job.scorers]
    if [body.target, body.behaviour] != asked:
        return f"got routes of {body.target} and {body.behaviour}, expected those of {' and '.join(asked)}"
    used, expected = foreign_weights((body.target_fingerprint, body.behaviour_fingerprint), probe), probe.checkpoint
    if used is not None:
        return f"a fingerprint has the weights {used}, expected {expected['digest']}, those of the probe"
    return None


ROUTING = DocumentKind(
    probe=ROUTING_PROBE,
    noun="comparison of routed experts",
    table=StoredRouting,
    check=_check,
    columns=lambda body, probe: {
        "pair": comparison_name(body.target, body.behaviour),
        **{name: getattr(probe, name) for name in _SIZE},
    },
    missing=RoutingMissing,
    wrong=NoRouting,
)


@router.put("/leases/{lease}/routing", status_code=status.HTTP_204_NO_CONTENT, tags=["leases"])
def put_routing(
    lease: LeaseIdentifier, token: LeaseToken, body: RoutingBody, context: Context, principal: Worker
) -> None:
    """Store a comparison of routed experts; it counts when the job is complete."""
    ROUTING.store(context, principal, lease, token, body)


@router.get("/runs/{run}/steps/{step}/routing", tags=["routing"])
def read_routing(
    run: RunIdentifier, step: StepPath, context: Context, principal: Reader, attempt: ActiveOrAttempt = None
) -> RoutingStepRead:
    """Return the newest comparison of routed experts of each pair of scorers at a step.

    404 `routing-not-found`: none is done; request a probe of the kind `routing`.
    """
    with context.database.read() as session:
        key = visible_step(session, principal, run, step, attempt)
        rows = ROUTING.newest(session, key, _MOST_READ)
    if not rows:
        raise RoutingNotFound(
            f"no routed experts of step {step} of attempt {key.attempt} are compared: request it with foreshock probe "
            f"{run} {step} --routing"
        )
    items = [
        RoutingRead.model_validate(row.document | {name: getattr(row, name) for name in (*_SIZE, "published_at_us")})
        for row in newest_by_pair(rows, _MOST_PAIRS)
    ]
    return RoutingStepRead(run=run, attempt=key.attempt, step=key.step, items=items)
