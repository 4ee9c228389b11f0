"""The presenter of open and acknowledged alerts, by what they are about."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from foreshock.diagnosis.risk import Family, family_of
from foreshock.diagnosis.run_verdict import StandingAlert
from foreshock.diagnosis.wording import plural
from foreshock.severity import severity_rank
from foreshock_service.present.pages.formatting import TONES, number
from foreshock_service.present.pages.presenters.viewing import Viewing
from foreshock_service.present.pages.view_models import AlertCard, AlertGroup
from foreshock_service.watch.alerts.schemas import AlertRead, AlertState
from foreshock_service.watch.alerts.service import list_alerts

MOST_ALERTS = 50
PLOTS: Mapping[Family, str] = {
    "mismatch": "mismatch", "lengths": "length", "gradient": "signals", "reward": "signals", "entropy": "signals",
}  # fmt: skip
"""The plot of the run's page that shows what the alerts of a family are about."""


def standing_alerts(viewing: Viewing, run_id: str) -> list[AlertRead]:
    """Return the open and acknowledged alerts of the run: the most severe first, then those of the newest steps."""
    states: tuple[AlertState, ...] = ("open", "acknowledged")
    found = list_alerts(viewing.session, viewing.principal, run_id, states, None, MOST_ALERTS).items
    return sorted(found, key=lambda each: severity_rank(each.severity))


def standing_alert(alert: AlertRead) -> StandingAlert:
    """Return what a conclusion on the run reads of an alert."""
    return StandingAlert(_name(alert), alert.severity, alert.step, alert.why, family_of(alert.rule) == "mismatch")


def alert_groups(run_id: str, run_address: str, alerts: Sequence[AlertRead]) -> list[AlertGroup]:
    """Return the alerts of each family as one line, in the order of `alerts`; the run's page is at `run_address`."""
    groups: dict[Family, list[AlertRead]] = {}
    for alert in alerts:
        groups.setdefault(family_of(alert.rule), []).append(alert)
    return [
        AlertGroup(
            severity=of_family[0].severity,
            tone=TONES[of_family[0].severity],
            summary=_summary(family, of_family),
            plot=PLOTS.get(family, ""),
            cards=[_card(run_id, run_address, each) for each in of_family],
        )
        for family, of_family in groups.items()
    ]


def _summary(family: Family, alerts: Sequence[AlertRead]) -> str:
    about = "" if family == "other" else f"{family}: "
    others = f", and {plural(len(alerts) - 1, 'more alert')}" if len(alerts) > 1 else ""
    return f"{about}{_name(alerts[0])}{others}, since step {min(each.step for each in alerts)}"


def _name(alert: AlertRead) -> str:
    return alert.rule.replace("_", " ")


def _card(run_id: str, run_address: str, alert: AlertRead) -> AlertCard:
    return AlertCard(
        address=f"/runs/{run_id}/alerts/{alert.id}",
        rule=_name(alert),
        severity=alert.severity,
        tone=TONES[alert.severity],
        state=alert.state,
        step=alert.step,
        step_address=f"{run_address}/steps/{alert.step}",
        measured=f"{number(alert.value)}, threshold {number(alert.threshold)}",
        why=alert.why,
        what_to_do=alert.what_to_do,
    )
