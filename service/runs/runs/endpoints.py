"""HTTP: runs."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Response, status

from foreshock.api.records import from_attributes
from foreshock.api.runs import RunRecord, ShownRunState
from foreshock.model_kind import ModelKind
from foreshock_service.platform.context import Context
from foreshock_service.platform.parameters import Cursor, Limit, Name, Page
from foreshock_service.platform.security import Administrator, Ingester, Reader
from foreshock_service.runs.runs import service
from foreshock_service.runs.runs.addresses import RunIdentifier
from foreshock_service.runs.runs.schemas import RunCreate, RunFilter, RunUpdate

router = APIRouter(prefix="/v1/runs", tags=["runs"])


@router.post(
    "", status_code=status.HTTP_201_CREATED, responses={200: {"model": RunRecord, "description": "It existed"}}
)
def create_run(body: RunCreate, context: Context, principal: Ingester, response: Response) -> RunRecord:
    """Get or create the run of (project, key): 201 if it is new, 200 with the unchanged run otherwise."""
    run, created = context.database.write(
        lambda session: service.get_or_create_run(session, context.events, principal, body)
    )
    if not created:
        response.status_code = status.HTTP_200_OK
    return from_attributes(RunRecord, run)


@router.get("")
def list_runs(
    context: Context,
    principal: Reader,
    project: Annotated[str | None, Query(max_length=200, pattern=r"^[^\x00]*$")] = None,
    key: Annotated[Name | None, Query(description="only runs with this client key: one per project")] = None,
    model: Annotated[Name | None, Query()] = None,
    model_kind: Annotated[ModelKind | None, Query()] = None,
    state: Annotated[list[ShownRunState] | None, Query(max_length=4, description="absent: all")] = None,
    search: Annotated[Name | None, Query(description="a part of the name or key, in any case")] = None,
    cursor: Cursor = None,
    limit: Limit = 50,
) -> Page[RunRecord]:
    """List runs, newest first."""
    chosen = RunFilter(principal.projects(project), key, model, model_kind, tuple(state or ()), search)
    with context.database.read() as session:
        return service.list_runs(session, chosen, cursor, limit)


@router.get("/{run}")
def read_run(run: RunIdentifier, context: Context, principal: Reader) -> RunRecord:
    """Return one run."""
    with context.database.read() as session:
        return from_attributes(RunRecord, service.get_run(session, principal, run))


@router.patch("/{run}")
def update_run(run: RunIdentifier, body: RunUpdate, context: Context, principal: Ingester) -> RunRecord:
    """Change a run's state, name, advice mode or model kind."""
    changed = context.database.write(lambda session: service.update_run(session, context.events, principal, run, body))
    return from_attributes(RunRecord, changed)


@router.delete("/{run}", status_code=status.HTTP_204_NO_CONTENT)
def delete_run(run: RunIdentifier, context: Context, principal: Administrator) -> None:
    """Delete a run; later calls that name it, late uploads included, return 410.

    Its rows are deleted in the background, its files after FORESHOCK_REMOVAL_GRACE_SECONDS. Its key stays taken.
    """
    context.database.write(lambda session: service.delete_run(session, context.events, principal, run))
