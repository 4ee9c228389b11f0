"""The publication of results: all results of a job are published at once, on completion."""

from dataclasses import dataclass

from fastapi import status
from sqlalchemy.orm import Session

from foreshock_service.platform import parameters, security
from foreshock_service.platform.context import Context
from foreshock_service.platform.database.engine import database_now_us
from foreshock_service.replay import leases
from foreshock_service.replay.probes import jobs
from foreshock_service.replay.results import documents, scores, vocabulary
from foreshock_service.runs import events

router = parameters.api_router()
# As routes, not as a router: FastAPI 0.165 keeps included routers apart, and `api_routes` has each route.
router.routes.extend([route for each in (scores, vocabulary, documents) for route in each.router.routes])


@dataclass(frozen=True, slots=True)
class ScoresPublished(events.StepEvent):
    """A job is complete and its scores of the step are published, in this transaction, without a lock of the run."""


@router.post("/v1/leases/{lease}/complete", status_code=status.HTTP_204_NO_CONTENT, tags=["leases"])
def complete(
    lease: leases.LeaseIdentifier, body: leases.TokenBody, context: Context, principal: security.Worker
) -> None:
    """Publish the job's results."""
    asked = leases.AskedLease(context, principal, lease, body.token)
    context.database.write(lambda session: publish_job(session, asked))


def publish_job(session: Session, asked: leases.AskedLease) -> None:
    """Publish the job's results and end the job; does nothing if this try has already published them.

    Raises LeaseNotFound, LeaseLost unless the token is the newest, and ResultIncomplete if results are missing.
    """
    lease, job, probe = asked.find(session, lock=True)
    if asked.has_completed(lease):
        return
    asked.check_held(lease, job)
    now = database_now_us(session)
    kind = documents.DOCUMENTS[probe.kind]
    # A probe of scores alone is of the kind `exact`, and has no document.
    if kind is not documents.EXACT or job.exact_pairs:
        kind.publish(session, job, probe, asked.token, now)
    if scores.publish_scores(session, lease, job, probe, now):
        asked.context.events.publish(session, ScoresPublished(probe.run_id, probe.attempt, probe.step))
    jobs.end(job, lease, jobs.Outcome.COMPLETED, jobs.JobState.DONE, now)
