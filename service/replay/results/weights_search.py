"""Weights searches: which announced weights, or parts of them, give the logged log-probs."""

import re

from fastapi import APIRouter, status
from sqlalchemy.orm import Session

from foreshock.api.records import from_attributes
from foreshock.api.replays import WeightsReplayRecord, WeightsSearchRecord
from foreshock.probe_kinds import WEIGHTS
from foreshock.weights_search import WeightsSearch
from foreshock_service.platform import problem, security
from foreshock_service.platform.context import Context
from foreshock_service.platform.database.tables import Probe, ProbeJob
from foreshock_service.platform.parameters import ActiveOrAttempt, StepPath
from foreshock_service.replay.leases.endpoints import LeaseIdentifier, LeaseToken
from foreshock_service.replay.results.documents import DocumentKind
from foreshock_service.runs.events import StepKey
from foreshock_service.runs.run_endpoints import RunIdentifier

router = APIRouter(prefix="/v1")


class WeightsSearchNotFound(problem.ProblemError):
    """No weights search of this step is done: request one with a probe of the kind `weights`."""

    status = 404
    problem_type = "weights-search-not-found"


MOST_ROWS = 1_000
_LONGEST_TEXT = 1_000
_PART = re.compile(r"[a-z0-9_.+-]{1,200}")


def _check(body: WeightsSearch, job: ProbeJob, probe: Probe) -> str | None:
    asked = job.scorers[0]["scorer"]
    if (body.step, body.scorer) != (probe.step, asked):
        return f"got a search of step {body.step} by {body.scorer}, expected one of step {probe.step} by {asked}"
    texts = [body.ended, *(each.skipped for each in body.replays)]
    if len(body.replays) > MOST_ROWS or any(len(each) > _LONGEST_TEXT for each in texts):
        return f"a search has at most {MOST_ROWS} replays, and texts of {_LONGEST_TEXT} characters"
    wrong = next((each.part for each in body.replays if not _PART.fullmatch(each.part)), None)
    if wrong is not None:
        return f"a part is a name such as lm_head or layers.3, or several joined by +, got {wrong!r}"
    sizes = [each for replay in body.replays for each in (replay.step, replay.k3_kl, replay.max_abs_d)]
    sizes += [body.tokens, body.rollouts, body.floor_k3, body.confirmed_k3]
    if any(each is not None and each < 0 for each in sizes):
        return "steps, counts, k3 and max |d| must be at least 0"
    return None


KIND = DocumentKind(
    probe=WEIGHTS,
    noun="weights search",
    check=_check,
    not_found=WeightsSearchNotFound,
    findings="attribution",  # it can name the cause of the step's mismatch
)


@router.put("/leases/{lease}/weights-search", status_code=status.HTTP_204_NO_CONTENT, tags=["leases"])
def put_search(
    lease: LeaseIdentifier, token: LeaseToken, body: WeightsSearch, context: Context, principal: security.Worker
) -> None:
    """Store the result of a weights search; it counts when the job is complete."""
    KIND.store(context, principal, lease, token, body)


@router.get("/runs/{run}/steps/{step}/weights-search", tags=["attribution"])
def read_search(
    run: RunIdentifier, step: StepPath, context: Context, principal: security.Reader, attempt: ActiveOrAttempt = None
) -> WeightsSearchRecord:
    """Return the newest weights search of a step: which announced weights, or parts of them, give the logged log-probs.

    404 `weights-search-not-found`: none is done; request a probe of the kind `weights`.
    """
    key, found = KIND.of_step(context, principal, run, step, attempt, 1)
    return search_record(key.run_id, key.attempt, WeightsSearch.from_dict(found[0][0].document))


def find_search(session: Session, key: StepKey) -> WeightsSearch | None:
    """Return the newest published search of a step."""
    found = KIND.newest(session, key, 1)
    return WeightsSearch.from_dict(found[0][0].document) if found else None


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
