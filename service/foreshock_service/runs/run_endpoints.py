"""HTTP: runs, and the run that a path names."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Path, Query, Request, Response, status
from sqlalchemy.orm import Session
from starlette.concurrency import run_in_threadpool

from foreshock.api import diagnosis, runs
from foreshock.model_kind import ModelKind
from foreshock_service.platform import pagination, parameters, security
from foreshock_service.platform.context import Context, ServiceContext
from foreshock_service.platform.database.tables import is_identifier
from foreshock_service.runs import runs as service

_Segment = Annotated[str, Path(max_length=200, pattern=parameters.SEGMENT_PATTERN)]


async def run_of_path(
    request: Request,
    context: Context,
    _: security.Bearer,
    run: Annotated[_Segment, Path(description="id or key of the run; write `/` in a key as `%2F`")],
    project: Annotated[
        parameters.Name | None, Query(description="project of the key, if several projects have it")
    ] = None,
) -> str:
    """Return the id of the run that a path of the API names. Raises RunNotFound, RunKeyAmbiguous."""
    # Trainers address runs by id: no query is made for them.
    if is_identifier("run", run):
        return run
    return await run_in_threadpool(_find, context, request, project, run)


async def run_of_page_path(request: Request, context: Context, project: _Segment, key: _Segment) -> str:
    """Return the id of the run that a page's path names. Raises RunNotFound."""
    return await run_in_threadpool(_find, context, request, parameters.decoded_segment(project), key)


RunIdentifier = Annotated[str, Depends(run_of_path)]
RunOfPage = Annotated[str, Depends(run_of_page_path)]


def _find(context: ServiceContext, request: Request, project: str | None, segment: str) -> str:
    principal = security.authenticate(context, request)
    with context.database.read() as session:
        return service.id_of_key(session, principal, project, parameters.decoded_segment(segment))


@dataclass(frozen=True, slots=True)
class AskedRun:
    """The run that a request names, and who asks."""

    context: ServiceContext
    principal: security.Principal
    run: str

    @contextmanager
    def reading(self) -> Iterator[Session]:
        """Open a session that reads the run. Raises RunNotFound, RunDeleted."""
        with self.context.database.read() as session:
            service.get_run(session, self.principal, self.run)
            yield session


async def _run_to_read(run: RunIdentifier, context: Context, principal: security.Reader) -> AskedRun:
    return AskedRun(context, principal, run)


RunToRead = Annotated[AskedRun, Depends(_run_to_read)]

router = parameters.api_router(prefix="/v1/runs", tags=["runs"])


@router.post(
    "", status_code=status.HTTP_201_CREATED, responses={200: {"model": runs.RunRecord, "description": "It existed"}}
)
def create_run(
    body: service.RunCreate, context: Context, principal: security.Ingester, response: Response
) -> runs.RunRecord:
    """Get or create the run of (project, key): 201 if it is new, 200 with the unchanged run otherwise."""

    def create(session: Session) -> tuple[runs.RunRecord, bool]:
        run, created = service.get_or_create_run(session, context.events, principal, body)
        return service.run_records(session, [run])[0], created

    record, created = context.database.write(create)
    if not created:
        response.status_code = status.HTTP_200_OK
    return record


@router.get("")
def list_runs(
    context: Context,
    principal: security.Reader,
    project: Annotated[str | None, Query(max_length=200, pattern=r"^[^\x00]*$")] = None,
    key: Annotated[parameters.Name | None, Query(description="only runs with this client key: one per project")] = None,
    model: Annotated[parameters.Name | None, Query()] = None,
    model_kind: Annotated[ModelKind | None, Query()] = None,
    state: Annotated[list[runs.ShownRunState] | None, Query(max_length=4, description="absent: all")] = None,
    search: Annotated[parameters.Name | None, Query(description="a part of the name or key, in any case")] = None,
    verdict: Annotated[
        diagnosis.Verdict | None, Query(description="only runs whose diagnosis has this verdict")
    ] = None,
    cursor: pagination.Cursor = None,
    limit: pagination.Limit = 50,
) -> pagination.Page[runs.RunRecord]:
    """List runs, newest first."""
    chosen = service.RunFilter(principal.projects(project), key, model, model_kind, tuple(state or ()), search, verdict)
    with context.database.read() as session:
        return service.list_runs(session, chosen, cursor, limit)


@router.get("/{run}")
def read_run(asked: RunToRead) -> runs.RunRecord:
    """Return one run."""
    with asked.reading() as session:
        return service.run_records(session, [service.get_run(session, asked.principal, asked.run)])[0]


@router.patch("/{run}")
def update_run(
    run: RunIdentifier, body: service.RunUpdate, context: Context, principal: security.Ingester
) -> runs.RunRecord:
    """Change a run's state, name, advice mode or model kind."""

    def update(session: Session) -> runs.RunRecord:
        changed = service.update_run(session, context.events, principal, run, body)
        return service.run_records(session, [changed])[0]

    return context.database.write(update)


@router.delete("/{run}", status_code=status.HTTP_204_NO_CONTENT)
def delete_run(run: RunIdentifier, context: Context, principal: security.Administrator) -> None:
    """Delete a run; later calls that name it, late uploads included, return 410.

    Its rows are deleted in the background, its files after FORESHOCK_REMOVAL_GRACE_SECONDS. Its key stays taken.
    """
    context.database.write(lambda session: service.delete_run(session, context.events, principal, run))
