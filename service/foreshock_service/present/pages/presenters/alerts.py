"""Alerts, announced changes and their marks in curves."""

from itertools import accumulate
from typing import Any, get_args
from urllib.parse import urlencode

from foreshock.api import watch
from foreshock.diagnosis.changes import change_in_words
from foreshock.diagnosis.episodes import episodes_of
from foreshock.diagnosis.quantities import LEARNING_RATE_KEY
from foreshock.severity import SEVERITIES, severity_rank
from foreshock_service.platform.database.tables import Run
from foreshock_service.platform.settings import Settings
from foreshock_service.present.pages.figures.overview import Mark
from foreshock_service.present.pages.presenters.advice import stairs_of
from foreshock_service.present.pages.presenters.viewing import Viewing, quantity_curves
from foreshock_service.runs import attempts, changes, steps
from foreshock_service.runs.runs import get_run
from foreshock_service.watch.advice.service import read_snapshot
from foreshock_service.watch.alerts import AlertFilter, alerts_by_run, alerts_of_run, alerts_of_runs, has_ended

RUN_DASHBOARD = "foreshock-run"
"""The uid of the dashboard of a run: dashboards/run.py."""


def run_dashboard(settings: Settings, run_id: str) -> str | None:
    """Return the address of the run's dashboard, with the run chosen; None without FORESHOCK_GRAFANA_URL."""
    if not settings.grafana_url:
        return None
    return f"{settings.grafana_url.rstrip('/')}/d/{RUN_DASHBOARD}?{urlencode({'var-run': run_id})}"


_HOUR_US = 3_600_000_000


def axes_of_run(viewing: Viewing, run_id: str) -> dict[str, Any]:
    """Return, for each axis, its known steps and the values there; an axis that is not logged is absent.

    `lr`: Σ η of the logged learning rates up to the step. `time`: hours since the first step's last shard.
    """
    axes: dict[str, Any] = {}
    run = get_run(viewing.session, viewing.principal, run_id)
    rates = quantity_curves(viewing, run, (LEARNING_RATE_KEY,))[LEARNING_RATE_KEY].points()
    if rates:
        sums = accumulate(rate for _, rate in rates)
        axes["lr"] = {"steps": [step for step, _ in rates], "values": list(sums)}
    times = steps.arrival_times(viewing.session, run_id)
    if times:
        start = times[0][1]
        hours = accumulate(((at - start) / _HOUR_US for _, at in times), max)
        axes["time"] = {"steps": [step for step, _ in times], "values": list(hours)}
    return axes


MOST_CHANGES = 200


def changes_of(viewing: Viewing, run_id: str) -> list[Mark]:
    return [
        Mark(change.step, change_in_words(change))
        for change in changes.newest_changes(viewing.session, run_id, MOST_CHANGES)
    ]


MOST_ALERTS, SHOWN_EPISODES, SHOWN_OF_EPISODE = 1000, 8, 50


def standing_alerts(viewing: Viewing, run_id: str) -> list[watch.AlertRecord]:
    """Return the open and acknowledged alerts of the run, the most severe and then the oldest first."""
    states: tuple[watch.AlertState, ...] = watch.STANDING
    found = alerts_of_run(viewing.session, viewing.principal, run_id, states, None, MOST_ALERTS).items
    return sorted(found, key=lambda each: (severity_rank(each.severity), each.onset, each.rule))


ALERTS_ON_A_PAGE = 25
STATES: tuple[watch.AlertState, ...] = get_args(watch.AlertState)


def alerts_page(viewing: Viewing, state: str, severity: str, cursor: str | None) -> dict[str, Any]:
    """Return the alerts of all runs that the visitor may see.

    Open ones are by run and episode: `running` and `ended` runs, each with its episodes, the worst first. Others are
    `rows`, the last changed first, a page of them. An empty or unknown state or severity is no restriction. Raises
    InvalidCursor.
    """
    chosen = AlertFilter(
        viewing.principal.projects(None),
        (state,) if state in STATES else (),
        (severity,) if severity in SEVERITIES else (),
    )
    page = {"state": state, "severity": severity, "states": STATES, "severities": SEVERITIES}
    if state == "open":
        by_run = [(run, episodes_of(alerts)) for run, alerts in alerts_by_run(viewing.session, chosen, MOST_ALERTS)]
        running = [each for each in by_run if not has_ended(each[0])]
        return page | {"running": running, "ended": by_run[len(running) :], "rows": (), "next_address": None}
    found = alerts_of_runs(viewing.session, chosen, cursor, ALERTS_ON_A_PAGE)
    # The state is part of the address even if empty: without it the page shows the open alerts.
    following = urlencode({"state": state, "severity": severity, "cursor": found.next_cursor or ""})
    next_address = f"/alerts?{following}" if found.next_cursor else None
    return page | {"running": (), "ended": (), "rows": found.items, "next_address": next_address}


MOST_MARKED = 200
MOST_DECAYS = 8
_SHOWN: tuple[watch.AlertState, ...] = (*watch.STANDING, "resolved")


def marks_of(viewing: Viewing, run_id: str) -> list[Mark]:
    """Return marks of a run's newest changes and of its newest warning and critical alerts."""
    found = alerts_of_run(viewing.session, viewing.principal, run_id, _SHOWN, None, MOST_MARKED).items
    alerts = [Mark(each.step, each.rule, each.severity) for each in found if each.severity != "info"]
    return [*changes_of(viewing, run_id), *alerts]


def named_marks(viewing: Viewing, run: Run) -> list[Mark]:
    """Return marks of the steps where attempts resumed, of the length surge, and of its decays so far."""
    marks = [
        Mark(each.resume_step, f"attempt {each.attempt}")
        for each in attempts.attempts_of_run(viewing.session, run.id)[1:]
    ]
    snapshot = read_snapshot(viewing.session, viewing.principal, run.id)
    state, now = snapshot.state, snapshot.detectors.step
    if state.schedule is not None:
        marks.append(Mark(state.schedule.surge_step, "surge"))
    if now is not None:
        marks += [Mark(step, f"× {scale:g}") for step, scale in stairs_of(state, now) if 0 < step <= now][-MOST_DECAYS:]
    return marks
