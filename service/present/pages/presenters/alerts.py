"""Alerts, announced changes and their marks in curves."""

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, get_args
from urllib.parse import urlencode

from foreshock import changes, page_addresses
from foreshock.api import runs, watch
from foreshock.diagnosis.wording import plural
from foreshock.severity import SEVERITIES, severity_rank
from foreshock_service.platform.database.tables import Run
from foreshock_service.platform.settings import Settings
from foreshock_service.present.pages import rendering, step_models, view_models
from foreshock_service.present.pages.figures.trends import Band, Mark
from foreshock_service.present.pages.presenters.advice import Scale, advice_of
from foreshock_service.present.pages.presenters.viewing import LEARNING_RATES, Viewing, first_of, scalar_curves
from foreshock_service.runs.attempts import attempts_of_run
from foreshock_service.runs.changes import newest_changes
from foreshock_service.runs.steps import arrival_times
from foreshock_service.watch.alerts import AlertFilter, list_alerts, list_alerts_of_runs

RUN_DASHBOARD = "foreshock-run"
"""The uid of the dashboard of a run: dashboards/run.py."""


def run_dashboard(settings: Settings, run_id: str) -> str | None:
    """Return the address of the run's dashboard, with the run chosen; None without FORESHOCK_GRAFANA_URL."""
    if not settings.grafana_url:
        return None
    return f"{settings.grafana_url.rstrip('/')}/d/{RUN_DASHBOARD}?{urlencode({'var-run': run_id})}"


_HOUR_US = 3_600_000_000


def axes_of_run(viewing: Viewing, run: Run) -> dict[str, Any]:
    """Return by axis the steps at which it is known and its values there; an axis that is not logged is absent.

    `lr`: Σ η up to the step, of the logged learning rates. `time`: hours from the first step's last shard.
    """
    axes: dict[str, Any] = {}
    rates = first_of(scalar_curves(viewing, run.id, LEARNING_RATES, max_points=None), LEARNING_RATES).points()
    if rates:
        sums = accumulate(rate for _, rate in rates)
        axes["lr"] = {"steps": [step for step, _ in rates], "values": list(sums)}
    times = arrival_times(viewing.session, run.id)
    if times:
        start = times[0][1]
        hours = accumulate(((at - start) / _HOUR_US for _, at in times), max)
        axes["time"] = {"steps": [step for step, _ in times], "values": list(hours)}
    return axes


MOST_CHANGES = 200
_MOST_DIFFERENCES = 3
_LONGEST_VALUE = 40
_NAMES: dict[changes.ChangeKind, str] = {
    "length_cap": "length cap",
    "curriculum": "curriculum",
    "data_mixture": "data mixture",
    "other": "announced change",
}


def marks_of(viewing: Viewing, run_id: str) -> list[Mark]:
    """Return the newest changes of a run, by step."""
    return [
        Mark(change.step, change_in_words(change)) for change in newest_changes(viewing.session, run_id, MOST_CHANGES)
    ]


def changes_in_words(viewing: Viewing, run_id: str) -> list[str]:
    """Return a sentence for each of the newest changes, the newest first."""
    return [f"step {mark.step}, {mark.text}" for mark in reversed(marks_of(viewing, run_id))]


def change_in_words(change: runs.ChangeRecord) -> str:
    """Return what changed, in a few words."""
    if change.kind == "setup":
        named = [_difference(each) for each in change.differences[:_MOST_DIFFERENCES]]
        others = len(change.differences) - len(named)
        return ", ".join(named) + (f" and {others} more fields" if others else "")
    text = _NAMES[change.kind]
    if change.before is not None or change.after is not None:
        text += f" {_value(change.before)} → {_value(change.after)}"
    return text if change.note is None else f"{text} ({change.note})"


def _difference(difference: runs.DifferenceRecord) -> str:
    before, after = (" and ".join(_value(each) for each in side) for side in (difference.before, difference.after))
    return f"{difference.name} {before} → {after}"


def _value(value: object) -> str:
    text = "?" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
    return text if len(text) <= _LONGEST_VALUE else f"{text[: _LONGEST_VALUE - 1]}…"


MOST_ALERTS = 50
PLOTS: Mapping[str, str] = {
    "mismatch": "mismatch", "sampling": "mismatch", "length": "length", "gradient": "signals", "policy": "signals",
    "reward": "signals",
}  # fmt: skip
"""The plot of the run's page that shows what the alerts of a cause are about."""


def standing_alerts(viewing: Viewing, run_id: str) -> list[watch.AlertRecord]:
    """Return the open and acknowledged alerts of the run: the most severe first, then those of the newest steps."""
    states: tuple[watch.AlertState, ...] = ("open", "acknowledged")
    found = list_alerts(viewing.session, viewing.principal, run_id, states, None, MOST_ALERTS).items
    return sorted(found, key=lambda each: severity_rank(each.severity))


def alert_groups(run_id: str, run_address: str, alerts: Sequence[watch.AlertRecord]) -> list[view_models.AlertGroup]:
    """Return the alerts of each cause as one line, in the order of `alerts`; the run's page is at `run_address`."""
    groups: dict[str, list[watch.AlertRecord]] = {}
    for alert in alerts:
        groups.setdefault(_cause_of(alert), []).append(alert)
    return [
        view_models.AlertGroup(
            severity=of_cause[0].severity,
            tone=rendering.TONES[of_cause[0].severity],
            summary=_summary(cause, of_cause),
            plot=PLOTS.get(cause, ""),
            cards=[_card(run_id, run_address, each) for each in of_cause],
        )
        for cause, of_cause in groups.items()
    ]


def _cause_of(alert: watch.AlertRecord) -> str:
    """Return the cause that the alert's rule is about; empty for those on the delivery of data."""
    known = "reward" if alert.rule.startswith("reward") else "length" if alert.rule.startswith("length") else ""
    return str(alert.evidence.get("cause", known))


def _summary(cause: str, alerts: Sequence[watch.AlertRecord]) -> str:
    about = f"{cause}: " if cause else ""
    others = f", and {plural(len(alerts) - 1, 'more alert')}" if len(alerts) > 1 else ""
    return f"{about}{_name(alerts[0])}{others}, since step {min(each.step for each in alerts)}"


def _name(alert: watch.AlertRecord) -> str:
    return alert.rule.replace("_", " ")


def _card(run_id: str, run_address: str, alert: watch.AlertRecord) -> view_models.AlertCard:
    return view_models.AlertCard(
        address=f"/runs/{run_id}/alerts/{alert.id}",
        rule=_name(alert),
        severity=alert.severity,
        tone=rendering.TONES[alert.severity],
        state=alert.state,
        step=alert.step,
        step_address=f"{run_address}/steps/{alert.step}",
        measured=f"{rendering.number(alert.value)}, threshold {rendering.number(alert.threshold)}",
        why=alert.why,
        what_to_do=alert.what_to_do,
    )


ALERTS_ON_A_PAGE = 25
STATES: tuple[watch.AlertState, ...] = get_args(watch.AlertState)


def alerts_page(viewing: Viewing, state: str, severity: str, cursor: str | None) -> step_models.AlertsPage:
    """Return one page of alerts; an empty or unknown state or severity is no restriction. Raises InvalidCursor."""
    chosen = AlertFilter(
        viewing.principal.projects(None),
        (state,) if state in STATES else (),
        (severity,) if severity in SEVERITIES else (),
    )
    found = list_alerts_of_runs(viewing.session, chosen, cursor, ALERTS_ON_A_PAGE)
    # The state is named even if it is empty: without it the page shows the open alerts.
    following = urlencode({"state": state, "severity": severity, "cursor": found.next_cursor or ""})
    return step_models.AlertsPage(
        rows=[_row(alert) for alert in found.items],
        state=state,
        severity=severity,
        states=STATES,
        severities=SEVERITIES,
        next_address=f"/alerts?{following}" if found.next_cursor else None,
    )


def _row(alert: watch.AlertOfRun) -> step_models.AlertOfRunRow:
    address = page_addresses.run_page_path(alert.project, alert.run_key)
    return step_models.AlertOfRunRow(
        run=alert.run_key,
        run_address=address,
        severity=view_models.Label(alert.severity, rendering.TONES[alert.severity]),
        rule=alert.rule.replace("_", " "),
        step=alert.step,
        step_address=f"{address}/steps/{alert.step}",
        state=alert.state,
        why=alert.why,
    )


MOST_BANDS = 30
MOST_DECAYS = 8
_SHOWN: tuple[watch.AlertState, ...] = ("open", "acknowledged", "resolved")


def bands_of(viewing: Viewing, run: Run) -> list[Band]:
    """Return the steps of the newest alerts, warnings and critical ones: from the alert to where its rule cleared."""
    found = list_alerts(viewing.session, viewing.principal, run.id, _SHOWN, None, MOST_BANDS).items
    last = run.last_step or 0
    bands = [
        Band(alert.step, last if alert.cleared_step is None else alert.cleared_step, alert.severity)
        for alert in found
        if alert.severity != "info"
    ]
    return disjoint(bands)


def disjoint(bands: Sequence[Band]) -> list[Band]:
    """Return the same steps as bands that do not overlap, in order, each with the worst severity of its steps.

    Bands are drawn translucent: a dozen of them above each other would hide the curve.
    """
    edges = sorted({edge for band in bands for edge in (band.first, max(band.last, band.first + 1))})
    found: list[Band] = []
    for first, last in pairwise(edges):
        here = [band.severity for band in bands if band.first <= first and max(band.last, band.first + 1) >= last]
        if not here:
            continue
        worst = "critical" if "critical" in here else here[0]
        if found and found[-1].last == first and found[-1].severity == worst:
            found[-1] = Band(found[-1].first, last, worst)
        else:
            found.append(Band(first, last, worst))
    return found


def named_marks(viewing: Viewing, run: Run) -> list[Mark]:
    """Return where attempts resumed, the length surge, and the decays that it led to so far."""
    marks = [Mark(each.resume_step, f"attempt {each.attempt}") for each in attempts_of_run(viewing.session, run.id)[1:]]
    advice = advice_of(viewing, run.id)
    if advice.schedule is not None:
        marks.append(Mark(advice.schedule.surge_step, "surge"))
    if advice.observed_step is not None:
        stairs = Scale.of(advice).stairs(advice.observed_step)
        marks += [Mark(step, f"× {scale:g}") for step, scale in stairs if 0 < step <= advice.observed_step][
            -MOST_DECAYS:
        ]
    return marks
