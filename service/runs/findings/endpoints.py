"""HTTP: findings of a run, and of all runs."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query

from foreshock.api.runs import FindingRecord, FindingSource
from foreshock.severity import Severity
from foreshock_service.platform import parameters, security
from foreshock_service.platform.context import Context
from foreshock_service.runs.findings import service
from foreshock_service.runs.findings.schemas import FindingFilter
from foreshock_service.runs.run_endpoints import RunIdentifier

router = APIRouter(prefix="/v1/runs/{run}/findings", tags=["findings"])

of_runs = APIRouter(prefix="/v1/findings", tags=["findings"])
_Several = Query(max_length=20, description="absent: all")


@router.get("")
def list_findings(
    run: RunIdentifier,
    context: Context,
    principal: security.Reader,
    source: Annotated[list[FindingSource] | None, _Several] = None,
    severity: Annotated[list[Severity] | None, _Several] = None,
    cursor: parameters.Cursor = None,
    limit: parameters.Limit = parameters.DEFAULT_LIMIT,
) -> parameters.Page[FindingRecord]:
    """Return what is concluded from the run's stored data: causes of mismatch and warnings of the lint.

    The last changed comes first. Attributed causes, and findings that late data or a resume takes away, are up to date
    within seconds.
    """
    chosen = FindingFilter(sources=tuple(source or ()), severities=tuple(severity or ()))
    with context.database.read() as session:
        return service.list_findings(session, principal, run, chosen, cursor, limit)


@of_runs.get("")
def list_findings_of_runs(
    context: Context,
    principal: security.Reader,
    project: Annotated[parameters.Name | None, Query()] = None,
    source: Annotated[list[FindingSource] | None, _Several] = None,
    severity: Annotated[list[Severity] | None, _Several] = None,
    name: Annotated[list[parameters.Name] | None, _Several] = None,
    cursor: parameters.Cursor = None,
    limit: parameters.Limit = parameters.DEFAULT_LIMIT,
) -> parameters.Page[FindingRecord]:
    """Return the findings of all runs that the key may see, the last changed first."""
    chosen = FindingFilter(
        projects=principal.projects(project),
        sources=tuple(source or ()),
        severities=tuple(severity or ()),
        names=tuple(name or ()),
    )
    with context.database.read() as session:
        return service.list_findings_of_runs(session, chosen, cursor, limit)
