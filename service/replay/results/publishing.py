"""The table of kinds of results, and their publication: all results of a job count together once it is complete."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, status
from sqlalchemy.orm import Session

from foreshock.probe_kinds import PROBE_KINDS
from foreshock_service.platform.context import Context, ServiceContext
from foreshock_service.platform.database.engine import database_now_us
from foreshock_service.platform.security import Principal, Worker
from foreshock_service.replay.leases.endpoints import LeaseIdentifier, TokenBody
from foreshock_service.replay.leases.service import find_lease, hold, is_completed
from foreshock_service.replay.probes import jobs as transitions
from foreshock_service.replay.results import documents, exact, scores
from foreshock_service.replay.results.exact import EXACT, MeasuredPair, measure_job, measures_of
from foreshock_service.replay.results.scores import SCORES
from foreshock_service.runs.events import StepEvent


@dataclass(frozen=True, slots=True)
class ScoresPublished(StepEvent):
    """A job is complete and its scores of the step count; `at_us` is the database's time.

    Published without a lock of the run, in the transaction that publishes the scores and again after its commit.
    """

    at_us: int


router = APIRouter()
router.include_router(scores.router)
router.include_router(exact.router)

DOCUMENTS: dict[str, documents.DocumentKind[Any]] = {}
"""The kinds of results that are documents, by the kind of their probe; `SCORES` and `EXACT` are files."""
for each in PROBE_KINDS.values():
    if each.document:
        # The module that is named as the end of their addresses.
        module = importlib.import_module(f"{__package__}.{each.document.replace('-', '_')}")
        DOCUMENTS[each.name] = module.KIND
        router.include_router(module.router)


@router.post("/v1/leases/{lease}/complete", status_code=status.HTTP_204_NO_CONTENT, tags=["leases"])
def complete(lease: LeaseIdentifier, body: TokenBody, context: Context, principal: Worker) -> None:
    """Publish the job's scores. The answer comes after the step's attribution was computed with them."""
    complete_job(context, principal, lease, body.token)


def complete_job(context: ServiceContext, principal: Principal, lease_id: str, token: int) -> None:
    """Publish the job's results and end the job; a repeated request changes nothing.

    Raises LeaseNotFound, LeaseLost unless the token is the newest, and the error of a kind of which some are missing.
    """
    measured = measure_job(context, principal, lease_id, token)
    context.database.write(lambda session: publish_job(session, context, principal, lease_id, token, measured))


def publish_job(
    session: Session,
    context: ServiceContext,
    principal: Principal,
    lease_id: str,
    token: int,
    measured: Mapping[str, MeasuredPair],
) -> None:
    """Publish the job's results in this transaction.

    `measured` are the measures of the exact pairs. A try that has published before publishes nothing.
    """
    lease, job, probe = find_lease(session, principal, lease_id)
    if is_completed(lease, token):
        return
    lease, job, probe = hold(session, principal, lease_id, token)
    for kind in (SCORES, EXACT):
        sent: Mapping[Any, Any] = kind.shards_of_try(session, job.id, token)
        for key in sorted(kind.asked(job)):
            kind.check_complete(key, sent.get(key, ()), probe)
    now = database_now_us(session)
    if job.exact_pairs:
        measures = measures_of(EXACT.shards_of_try(session, job.id, token), measured)
        EXACT.publish(session, lease, job, probe, now, measures)
    if probe.kind in DOCUMENTS:
        DOCUMENTS[probe.kind].publish(session, job, probe, token, now)
    # Configurations of a matrix, which the run does not have, are no part of its chain.
    if PROBE_KINDS[probe.kind].in_chain and SCORES.publish(session, lease, job, probe, now):
        context.events.publish(session, ScoresPublished(probe.run_id, probe.attempt, probe.step, now))
    transitions.complete(job, lease, now)
