"""The presenter of open and acknowledged alerts."""

from __future__ import annotations

from foreshock.severity import severity_rank
from service.present.pages.formatting import TONES, number
from service.present.pages.presenters.viewing import Viewing
from service.present.pages.view_models import AlertCard
from service.watch.alerts.schemas import AlertRead, AlertState
from service.watch.alerts.service import list_alerts

MOST_ALERTS = 50


def standing_alerts(viewing: Viewing, run_id: str, run_address: str) -> list[AlertCard]:
    """Return the open and acknowledged alerts of the run, whose page is at `run_address`.

    The most severe come first, then those of the newest steps.
    """
    states: tuple[AlertState, ...] = ("open", "acknowledged")
    found = list_alerts(viewing.session, viewing.principal, run_id, states, None, MOST_ALERTS).items
    return [_card(run_id, run_address, alert) for alert in sorted(found, key=lambda each: severity_rank(each.severity))]


def _card(run_id: str, run_address: str, alert: AlertRead) -> AlertCard:
    return AlertCard(
        address=f"/runs/{run_id}/alerts/{alert.id}",
        rule=alert.rule.replace("_", " "),
        severity=alert.severity,
        tone=TONES[alert.severity],
        state=alert.state,
        step=alert.step,
        step_address=f"{run_address}/steps/{alert.step}",
        measured=f"{number(alert.value)}, threshold {number(alert.threshold)}",
        why=alert.why,
        what_to_do=alert.what_to_do,
    )
