"""The presenter of the alerts of all runs."""

from __future__ import annotations

from typing import get_args
from urllib.parse import urlencode

from foreshock.page_addresses import run_page_path
from foreshock.severity import SEVERITIES
from foreshock_service.present.pages.formatting import TONES
from foreshock_service.present.pages.list_models import AlertOfRunRow, AlertsPage
from foreshock_service.present.pages.presenters.viewing import Viewing
from foreshock_service.present.pages.view_models import Label
from foreshock_service.watch.alerts.schemas import AlertFilter, AlertOfRun, AlertState
from foreshock_service.watch.alerts.service import list_alerts_of_runs

ALERTS_ON_A_PAGE = 25
STATES: tuple[AlertState, ...] = get_args(AlertState)


def alerts_page(viewing: Viewing, state: str, severity: str, cursor: str | None) -> AlertsPage:
    """Return one page of alerts; an empty or unknown state or severity is no restriction. Raises InvalidCursor."""
    chosen = AlertFilter(
        viewing.principal.projects(None),
        (state,) if state in STATES else (),
        (severity,) if severity in SEVERITIES else (),
    )
    found = list_alerts_of_runs(viewing.session, chosen, cursor, ALERTS_ON_A_PAGE)
    # The state is named even if it is empty: without it the page shows the open alerts.
    following = urlencode({"state": state, "severity": severity, "cursor": found.next_cursor or ""})
    return AlertsPage(
        rows=[_row(alert) for alert in found.items],
        state=state,
        severity=severity,
        states=STATES,
        severities=SEVERITIES,
        next_address=f"/alerts?{following}" if found.next_cursor else None,
    )


def _row(alert: AlertOfRun) -> AlertOfRunRow:
    address = run_page_path(alert.project, alert.run_key)
    return AlertOfRunRow(
        run=alert.run_key,
        run_address=address,
        severity=Label(alert.severity, TONES[alert.severity]),
        rule=alert.rule.replace("_", " "),
        step=alert.step,
        step_address=f"{address}/steps/{alert.step}",
        state=alert.state,
        why=alert.why,
    )
