"""Addresses of runs: in a path of the API, a run is its id, or the key that its client gave it.

An id has a fixed form (`run_` and 26 letters), and a text of that form is always an id; any other text is a key. Keys
are unique in a project: a caller who is bound to a project addresses its runs, any other caller adds `?project=` if
several projects have the key. Pages name the project: `/runs/{project}/{key}`.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Path, Query, Request
from fastapi.security import HTTPAuthorizationCredentials
from starlette.concurrency import run_in_threadpool

from foreshock_service.platform.context import Context, ServiceContext
from foreshock_service.platform.database.tables.base import is_identifier
from foreshock_service.platform.parameters import SEGMENT_PATTERN, Name, decoded_segment
from foreshock_service.platform.security import authenticate, bearer
from foreshock_service.runs.runs.service import id_of_key

_Segment = Annotated[str, Path(max_length=200, pattern=SEGMENT_PATTERN)]
_Credentials = Annotated[HTTPAuthorizationCredentials | None, Depends(bearer)]


async def run_of_path(
    request: Request,
    context: Context,
    credentials: _Credentials,
    run: Annotated[_Segment, Path(description="id or key of the run; write `/` in a key as `%2F`")],
    project: Annotated[Name | None, Query(description="project of the key, if several projects have it")] = None,
) -> str:
    """Return the id of the run that a path of the API names. Raises RunNotFound, RunKeyAmbiguous."""
    # Trainers address runs by id: no query is made for them.
    if is_identifier("run", run):
        return run
    return await run_in_threadpool(_find, context, request, credentials, project, run)


async def run_of_page_path(
    request: Request, context: Context, credentials: _Credentials, project: _Segment, key: _Segment
) -> str:
    """Return the id of the run that a page's path names. Raises RunNotFound."""
    return await run_in_threadpool(_find, context, request, credentials, decoded_segment(project), key)


RunIdentifier = Annotated[str, Depends(run_of_path)]
RunOfPage = Annotated[str, Depends(run_of_page_path)]


def _find(
    context: ServiceContext,
    request: Request,
    credentials: HTTPAuthorizationCredentials | None,
    project: str | None,
    segment: str,
) -> str:
    principal = authenticate(context, request, credentials.credentials if credentials else None)
    with context.database.read() as session:
        return id_of_key(session, principal, project, decoded_segment(segment))
