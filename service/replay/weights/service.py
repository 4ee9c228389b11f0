"""Weights searches: stored while a job runs, published when it is complete, read by step."""

from __future__ import annotations

from sqlalchemy.orm import Session

from foreshock.weights_search import PROBE_KIND, WeightsSearch
from foreshock_service.platform.context import ServiceContext
from foreshock_service.platform.database.tables.probe_results import StoredWeightsSearch
from foreshock_service.platform.database.tables.probes import Probe, ProbeJob
from foreshock_service.platform.problem import ProblemError
from foreshock_service.platform.security import Principal
from foreshock_service.replay.leases.result_repository import ResultRepository
from foreshock_service.replay.leases.service import hold
from foreshock_service.replay.weights.schemas import WeightsSearchBody, WeightsSearchRead, storable
from foreshock_service.runs.attempts.service import resolve_step
from foreshock_service.runs.findings.service import mark_due
from foreshock_service.runs.runs.service import get_run
from foreshock_service.runs.step_key import StepKey

_RESULTS = ResultRepository(StoredWeightsSearch)


class WeightsSearchNotFound(ProblemError):
    """No weights search of this step is done: request one with a probe of the kind `weights`."""

    status = 404
    problem_type = "weights-search-not-found"


class WeightsSearchMissing(ProblemError):
    """The job is a weights search and its result was not sent."""

    status = 409
    problem_type = "weights-search-missing"


class NoWeightsSearch(ProblemError):
    """The job requests no weights search, or the result is of another step or scorer than the job."""

    status = 422
    problem_type = "no-weights-search"


def store_search(
    context: ServiceContext, principal: Principal, lease_id: str, token: int, body: WeightsSearchBody
) -> None:
    """Store the result of a leased search; sent again, it replaces itself.

    Raises LeaseNotFound, LeaseLost, NoWeightsSearch.
    """
    context.database.write(lambda session: _store(session, principal, lease_id, token, body))


def publish_search(session: Session, job: ProbeJob, probe: Probe, token: int, now_us: int) -> None:
    """Publish the result of this try, if its job is a search. Raises WeightsSearchMissing if it was not sent."""
    if probe.kind != PROBE_KIND:
        return
    if not _RESULTS.publish(session, job.id, token, now_us):
        raise WeightsSearchMissing(
            "the result of the weights search is missing: send it with PUT /v1/leases/{lease}/weights-search, then "
            "complete"
        )
    # A search can name the cause of the step's mismatch.
    mark_due(session, probe.run_id, "attribution")


def find_search(session: Session, key: StepKey) -> WeightsSearch | None:
    """Return the newest published search of a step."""
    found = _RESULTS.newest(session, key, 1)
    return WeightsSearch.from_dict(found[0].document) if found else None


def read_search(
    session: Session, principal: Principal, run_id: str, step: int, attempt: int | None
) -> WeightsSearchRead:
    """Return the newest search of a step. Raises WeightsSearchNotFound, RunNotFound, RunDeleted."""
    get_run(session, principal, run_id)
    key = resolve_step(session, run_id, step, attempt)
    search = find_search(session, key)
    if search is None:
        raise WeightsSearchNotFound(
            f"no weights search of step {step} of attempt {key.attempt} is done: request one with "
            f"foreshock probe {run_id} {step} --weights-search"
        )
    return WeightsSearchRead.of(key.run_id, key.attempt, search)


def _store(session: Session, principal: Principal, lease_id: str, token: int, body: WeightsSearchBody) -> None:
    _, job, probe = hold(session, principal, lease_id, token)
    if probe.kind != PROBE_KIND:
        raise NoWeightsSearch(f"the job is of a probe of the kind {probe.kind!r}, expected {PROBE_KIND!r}")
    asked = job.scorers[0]["scorer"]
    if (body.step, body.scorer) != (probe.step, asked):
        raise NoWeightsSearch(
            f"got a search of step {body.step} by {body.scorer}, expected one of step {probe.step} by {asked}"
        )
    row = {
        "job_id": job.id,
        "token": token,
        "run_id": probe.run_id,
        "attempt": probe.attempt,
        "step": probe.step,
        "document": storable(body),
        "published_at_us": None,
    }
    _RESULTS.put(session, row)
