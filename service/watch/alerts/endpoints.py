"""HTTP: alerts."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Query

from service.platform.context import Context
from service.platform.pagination import Cursor, Limit, Page
from service.platform.security import Ingester, Reader
from service.runs.runs.addresses import RunIdentifier
from service.watch.alerts import service
from service.watch.alerts.schemas import AlertRead, AlertState

router = APIRouter(prefix="/v1/runs/{run}/alerts", tags=["alerts"])

AlertIdentifier = Annotated[str, Path(max_length=100, pattern=r"^[A-Za-z0-9_]+$")]


@router.get("")
def list_alerts(
    run: RunIdentifier,
    context: Context,
    principal: Reader,
    state: Annotated[list[AlertState] | None, Query(max_length=4, description="absent: all")] = None,
    cursor: Cursor = None,
    limit: Limit = 50,
) -> Page[AlertRead]:
    """Return a run's alerts, newest step first."""
    with context.database.read() as session:
        return service.list_alerts(session, principal, run, state or (), cursor, limit)


@router.post("/{alert}/acknowledge")
def acknowledge(run: RunIdentifier, alert: AlertIdentifier, context: Context, principal: Ingester) -> AlertRead:
    """Mark the alert as seen by a person; 409 if it is resolved or retracted."""
    return context.database.write(
        lambda session: AlertRead.model_validate(service.acknowledge(session, principal, run, alert))
    )


@router.post("/{alert}/resolve")
def resolve(run: RunIdentifier, alert: AlertIdentifier, context: Context, principal: Ingester) -> AlertRead:
    """Resolve the alert; the rule may fire again later, as a new alert."""
    return context.database.write(
        lambda session: AlertRead.model_validate(service.resolve(session, principal, run, alert))
    )
