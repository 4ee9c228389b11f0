"""HTTP: alerts."""

from typing import Annotated

from fastapi import Header, Path, Query, Response
from starlette.concurrency import run_in_threadpool

from foreshock.api import records, watch
from foreshock.severity import Severity
from foreshock_service.platform.context import Context
from foreshock_service.platform.parameters import DEFAULT_LIMIT, Cursor, Limit, Name, Page, api_router
from foreshock_service.platform.security import Ingester, Reader
from foreshock_service.runs.run_endpoints import RunIdentifier
from foreshock_service.watch import alerts as service
from foreshock_service.watch.alerts import AlertFilter
from foreshock_service.watch.long_polls import LONGEST_WAIT_SECONDS, NOT_MODIFIED, LongPollsOfApp, tagged_response

router = api_router(prefix="/v1", tags=["alerts"])

Several = Query(max_length=20, description="absent: all")

AlertIdentifier = Annotated[str, Path(max_length=100, pattern=r"^[A-Za-z0-9_]+$")]


@router.get("/runs/{run}/alerts", response_model=Page[watch.AlertRecord], responses=NOT_MODIFIED)
async def list_alerts(
    run: RunIdentifier,
    context: Context,
    principal: Reader,
    polls: LongPollsOfApp,
    state: Annotated[list[watch.AlertState] | None, Query(max_length=4, description="absent: all")] = None,
    cursor: Cursor = None,
    limit: Limit = DEFAULT_LIMIT,
    wait: Annotated[
        float, Query(ge=0, le=LONGEST_WAIT_SECONDS, description="seconds to wait for a change of an alert")
    ] = 0.0,
    if_none_match: Annotated[str | None, Header(max_length=1000)] = None,
) -> Response:
    """Return a run's alerts, newest step first; 304 if the bytes are those of If-None-Match.

    With `wait` and If-None-Match the answer comes when an alert of the run has changed since that answer.
    """
    await polls.until_changed(principal, run, lambda version: version.of_alerts, if_none_match, wait)

    def answer() -> Response:
        with context.database.read() as session:
            # First, since alerts that are newer than their entity tag end the next poll, but older ones would be kept.
            version = service.version(session, run)
            found = service.list_alerts(session, principal, run, state or (), cursor, limit)
        return tagged_response(str(version), found, if_none_match)

    return await run_in_threadpool(answer)


@router.get("/alerts")
def list_alerts_of_runs(
    context: Context,
    principal: Reader,
    project: Annotated[Name | None, Query()] = None,
    state: Annotated[list[watch.AlertState] | None, Several] = None,
    severity: Annotated[list[Severity] | None, Several] = None,
    rule: Annotated[list[Name] | None, Several] = None,
    cursor: Cursor = None,
    limit: Limit = 50,
) -> Page[watch.AlertOfRun]:
    """Return the alerts of all runs that the key may see, the last changed first."""
    chosen = AlertFilter(principal.projects(project), tuple(state or ()), tuple(severity or ()), tuple(rule or ()))
    with context.database.read() as session:
        return service.list_alerts_of_runs(session, chosen, cursor, limit)


@router.post("/runs/{run}/alerts/{alert}/acknowledge")
def acknowledge(run: RunIdentifier, alert: AlertIdentifier, context: Context, principal: Ingester) -> watch.AlertRecord:
    """Mark the alert as seen by a person; 409 if it is resolved or retracted."""
    return context.database.write(
        lambda session: records.from_attributes(watch.AlertRecord, service.acknowledge(session, principal, run, alert))
    )


@router.post("/runs/{run}/alerts/{alert}/resolve")
def resolve(run: RunIdentifier, alert: AlertIdentifier, context: Context, principal: Ingester) -> watch.AlertRecord:
    """Resolve the alert; the rule may fire again later, as a new alert."""
    return context.database.write(
        lambda session: records.from_attributes(watch.AlertRecord, service.resolve(session, principal, run, alert))
    )
