"""Comparisons of routed experts: stored while a job runs, published when it is complete, read by step."""

from __future__ import annotations

from sqlalchemy.orm import Session

from foreshock.comparisons import comparison_name
from foreshock.routing import ROUTING_KIND
from foreshock.scorers import score_name
from foreshock_service.platform.context import ServiceContext
from foreshock_service.platform.database.tables.probe_results import StoredRouting
from foreshock_service.platform.database.tables.probes import Probe, ProbeJob
from foreshock_service.platform.problem import ProblemError
from foreshock_service.platform.security import Principal
from foreshock_service.replay.leases.result_repository import ResultRepository
from foreshock_service.replay.leases.service import hold
from foreshock_service.replay.routing.schemas import RoutingBody, RoutingRead, RoutingStepRead
from foreshock_service.runs.attempts.service import resolve_step
from foreshock_service.runs.runs.service import get_run

_RESULTS = ResultRepository(StoredRouting)
# Comparisons of a step that are looked at, newest first, and pairs that are shown.
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


def store_routing(context: ServiceContext, principal: Principal, lease_id: str, token: int, body: RoutingBody) -> None:
    """Store the result of a leased job; sent again, it replaces itself. Raises LeaseNotFound, LeaseLost, NoRouting."""
    context.database.write(lambda session: _store(session, principal, lease_id, token, body))


def publish_routing(session: Session, job: ProbeJob, probe: Probe, token: int, now_us: int) -> None:
    """Publish the result of this try, if its job compares routed experts. Raises RoutingMissing if it was not sent."""
    if probe.kind != ROUTING_KIND:
        return
    if not _RESULTS.publish(session, job.id, token, now_us):
        raise RoutingMissing(
            "the comparison of routed experts is missing: send it with PUT /v1/leases/{lease}/routing, then complete"
        )


def read_routing(
    session: Session, principal: Principal, run_id: str, step: int, attempt: int | None
) -> RoutingStepRead:
    """Return the newest comparison of each pair of a step. Raises RoutingNotFound, RunNotFound, RunDeleted."""
    get_run(session, principal, run_id)
    key = resolve_step(session, run_id, step, attempt)
    newest: dict[str, StoredRouting] = {}
    for row in _RESULTS.newest(session, key, _MOST_READ):
        newest.setdefault(row.pair, row)
    if not newest:
        raise RoutingNotFound(
            f"no routed experts of step {step} of attempt {key.attempt} are compared: request it with foreshock probe "
            f"{run_id} {step} --routing"
        )
    items = [RoutingRead.model_validate(_shown(row)) for row in list(newest.values())[:_MOST_PAIRS]]
    return RoutingStepRead(run=run_id, attempt=key.attempt, step=key.step, items=items)


def _shown(row: StoredRouting) -> dict[str, object]:
    return {
        **row.document,
        "rollouts": row.rollouts,
        "tokens": row.tokens,
        "from_sample": row.from_sample,
        "published_at_us": row.published_at_us,
    }


def _store(session: Session, principal: Principal, lease_id: str, token: int, body: RoutingBody) -> None:
    _, job, probe = hold(session, principal, lease_id, token)
    if probe.kind != ROUTING_KIND:
        raise NoRouting(f"the job is of a probe of the kind {probe.kind!r}, expected {ROUTING_KIND!r}")
    asked = [score_name(each["scorer"], each["variant"]) for each in job.scorers]
    if [body.target, body.behaviour] != asked:
        raise NoRouting(f"got routes of {body.target} and {body.behaviour}, expected those of {' and '.join(asked)}")
    for fingerprint in (body.target_fingerprint, body.behaviour_fingerprint):
        used, expected = fingerprint.get("weights_digest"), probe.checkpoint["digest"]
        if used not in (None, expected):
            raise NoRouting(f"a fingerprint has the weights {used}, expected {expected}, those of the probe")
    row = {
        "job_id": job.id,
        "token": token,
        "run_id": probe.run_id,
        "attempt": probe.attempt,
        "step": probe.step,
        "pair": comparison_name(body.target, body.behaviour),
        "rollouts": probe.rollouts,
        "tokens": probe.tokens,
        "from_sample": probe.from_sample,
        "document": body.model_dump(mode="json"),
        "published_at_us": None,
    }
    _RESULTS.put(session, row)
