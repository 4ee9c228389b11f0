"""HTTP: probes."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Query, Response, status

from foreshock.api.probes import ProbeRecord
from foreshock_service.platform.context import Context
from foreshock_service.platform.parameters import LARGEST_STEP, Cursor, Limit, Name, Page
from foreshock_service.platform.security import Ingester, Reader
from foreshock_service.replay.probes import requests, service
from foreshock_service.replay.probes.schemas import ProbeCreate
from foreshock_service.runs.run_endpoints import RunIdentifier

router = APIRouter(prefix="/v1", tags=["probes"])
ProbeIdentifier = Annotated[str, Path(max_length=100, pattern=r"^[A-Za-z0-9_]+$")]


@router.post(
    "/runs/{run}/probes",
    status_code=status.HTTP_201_CREATED,
    responses={200: {"model": ProbeRecord, "description": "An equal request exists; this is its probe"}},
)
def create_probe(
    run: RunIdentifier, body: ProbeCreate, context: Context, principal: Ingester, response: Response
) -> ProbeRecord:
    """Request that workers score a step's rollouts again; an equal request returns the same probe."""
    probe, created = requests.create_probe(context, principal, run, body)
    if not created:
        response.status_code = status.HTTP_200_OK
    return probe


@router.get("/runs/{run}/probes")
def list_probes(
    run: RunIdentifier,
    context: Context,
    principal: Reader,
    step: Annotated[int | None, Query(ge=0, le=LARGEST_STEP)] = None,
    cursor: Cursor = None,
    limit: Limit = 50,
) -> Page[ProbeRecord]:
    """Return a page of a run's probes, newest first."""
    with context.database.read() as session:
        return service.list_probes(session, principal, run, step, cursor, limit)


@router.get("/probes")
def list_probes_of_runs(
    context: Context,
    principal: Reader,
    project: Annotated[Name | None, Query()] = None,
    kind: Annotated[Name | None, Query(description="such as `exact` or `weights`; absent: all")] = None,
    cursor: Cursor = None,
    limit: Limit = 50,
) -> Page[ProbeRecord]:
    """Return a page of the probes of all runs that the key may see, newest first."""
    with context.database.read() as session:
        return service.list_probes_of_runs(session, principal.projects(project), kind, cursor, limit)


@router.get("/probes/{probe}")
def read_probe(probe: ProbeIdentifier, context: Context, principal: Reader) -> ProbeRecord:
    """Return a probe with its jobs, their states and the reasons of failures and of waiting."""
    with context.database.read() as session:
        return service.read_probe(session, principal, probe)


@router.post("/probes/{probe}/retry")
def retry_probe(probe: ProbeIdentifier, context: Context, principal: Ingester) -> ProbeRecord:
    """Queue the failed and skipped jobs of an ended probe again, for example when the weights are back."""
    return context.database.write(lambda session: service.retry_probe(session, principal, probe))


@router.delete("/probes/{probe}")
def cancel_probe(probe: ProbeIdentifier, context: Context, principal: Ingester) -> ProbeRecord:
    """Cancel a probe: its unfinished jobs are skipped, and what a worker still sends for them is refused.

    Scores of jobs that are done stay. A cancelled probe can be retried; an equal request finds it as it is.
    """
    return context.database.write(lambda session: service.cancel_probe(session, principal, probe))
