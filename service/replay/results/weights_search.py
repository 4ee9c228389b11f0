"""Weights searches: which announced weights, or parts of them, give the logged log-probs."""

from __future__ import annotations

from fastapi import APIRouter, status
from sqlalchemy.orm import Session

from foreshock.api.records import from_attributes
from foreshock.api.replays import WeightsReplayRecord, WeightsSearchRecord
from foreshock.probe_kinds import WEIGHTS
from foreshock.weights_search import WeightsSearch
from foreshock_service.platform.context import Context
from foreshock_service.platform.database.tables.probes import Probe, ProbeJob, StoredWeightsSearch
from foreshock_service.platform.parameters import ActiveOrAttempt, StepPath
from foreshock_service.platform.problem import ProblemError
from foreshock_service.platform.security import Reader, Worker
from foreshock_service.replay.leases.endpoints import LeaseIdentifier, LeaseToken
from foreshock_service.replay.results.documents import DocumentKind, visible_step
from foreshock_service.replay.results.weights_search_schemas import WeightsSearchBody
from foreshock_service.runs.events import StepKey
from foreshock_service.runs.run_endpoints import RunIdentifier

router = APIRouter(prefix="/v1")


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


def _check(body: WeightsSearchBody, job: ProbeJob, probe: Probe) -> str | None:
    asked = job.scorers[0]["scorer"]
    if (body.step, body.scorer) != (probe.step, asked):
        return f"got a search of step {body.step} by {body.scorer}, expected one of step {probe.step} by {asked}"
    return None


WEIGHTS_SEARCH = DocumentKind(
    probe=WEIGHTS,
    noun="result of the weights search",
    table=StoredWeightsSearch,
    check=_check,
    columns=lambda body, probe: {},
    missing=WeightsSearchMissing,
    wrong=NoWeightsSearch,
    findings="attribution",  # it can name the cause of the step's mismatch
)


@router.put("/leases/{lease}/weights-search", status_code=status.HTTP_204_NO_CONTENT, tags=["leases"])
def put_search(
    lease: LeaseIdentifier, token: LeaseToken, body: WeightsSearchBody, context: Context, principal: Worker
) -> None:
    """Store the result of a weights search; it counts when the job is complete."""
    WEIGHTS_SEARCH.store(context, principal, lease, token, body)


@router.get("/runs/{run}/steps/{step}/weights-search", tags=["attribution"])
def read_search(
    run: RunIdentifier, step: StepPath, context: Context, principal: Reader, attempt: ActiveOrAttempt = None
) -> WeightsSearchRecord:
    """Return the newest weights search of a step: which announced weights, or parts of them, give the logged log-probs.

    404 `weights-search-not-found`: none is done; request a probe of the kind `weights`.
    """
    with context.database.read() as session:
        key = visible_step(session, principal, run, step, attempt)
        search = find_search(session, key)
    if search is None:
        raise WeightsSearchNotFound(
            f"no weights search of step {step} of attempt {key.attempt} is done: request one with "
            f"foreshock probe {run} {step} --weights-search"
        )
    return search_record(key.run_id, key.attempt, search)


def find_search(session: Session, key: StepKey) -> WeightsSearch | None:
    """Return the newest published search of a step."""
    found = WEIGHTS_SEARCH.newest(session, key, 1)
    return WeightsSearch.from_dict(found[0].document) if found else None


def search_record(run: str, attempt: int, search: WeightsSearch) -> WeightsSearchRecord:
    """Return the search as it is shown."""
    replays = tuple(
        from_attributes(
            WeightsReplayRecord,
            replay,
            weights=search.describe(replay),
            announced=search.is_announced(replay),
            at_noise_floor=search.reproduces(replay),
        )
        for replay in search.replays
    )
    return from_attributes(WeightsSearchRecord, search, run=run, attempt=attempt, replays=replays)
