"""The presenter of the list of runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import urlencode

from foreshock.comparisons import STEP_ROW
from foreshock.diagnosis.health import PooledMeasure
from foreshock.diagnosis.risk import LEVELS, Risk
from foreshock.diagnosis.run_verdict import SteppedValues, reward_fall
from foreshock.learning_rate.decisions import AdviceState
from foreshock.page_addresses import run_page_path
from foreshock_service.present.pages.figures import Curve
from foreshock_service.present.pages.figures.sparkline import sparkline
from foreshock_service.present.pages.formatting import RUN_STATES, alerts_label, label_of, moment, number
from foreshock_service.present.pages.list_models import RunRow, RunsFilter, RunsPage
from foreshock_service.present.pages.presenters.health import pooled_in_words
from foreshock_service.present.pages.presenters.risk import risk_label
from foreshock_service.present.pages.presenters.viewing import Viewing
from foreshock_service.present.pages.view_models import Label
from foreshock_service.runs.health.service import pooled_mismatch
from foreshock_service.runs.measurements.curves import MeasuredStep
from foreshock_service.runs.measurements.service import incomplete_counts, newest_steps
from foreshock_service.runs.runs.schemas import RunFilter, RunRead, ShownRunState
from foreshock_service.runs.runs.service import list_runs
from foreshock_service.watch.advice.service import states_of_runs
from foreshock_service.watch.alerts.service import open_counts
from foreshock_service.watch.detection.states import observed_steps
from foreshock_service.watch.risk.service import MOST_SEARCHED, risks_of_runs, runs_at_risk

RUNS_ON_A_PAGE = 25
STATES: tuple[ShownRunState, ...] = ("running", "stale", "finished", "failed")
RISKS = LEVELS[1:]
"""Levels that the list can be restricted to: so high, or higher."""

REWARD_STEPS = 300
"""The newest steps whose reward is drawn in the list, and in which a fall is looked for."""


@dataclass(frozen=True, slots=True)
class RunsQuery:
    """What a visitor asks the list for; empty: no restriction."""

    search: str = ""
    project: str = ""
    model: str = ""
    state: str = ""
    risk: str = ""
    cursor: str | None = None

    def filter(self, projects: tuple[str, ...]) -> RunFilter:
        """Return the filter, within the projects that the visitor may see."""
        states = tuple(each for each in STATES if each == self.state)
        chosen = (*projects, self.project) if self.project else projects
        return RunFilter(chosen, model=self.model or None, states=states, search=self.search or None)

    def address(self, cursor: str) -> str:
        """Return the address of the next page of the same query."""
        asked = {
            "search": self.search, "project": self.project, "model": self.model, "state": self.state, "risk": self.risk,
        }  # fmt: skip
        return f"/?{urlencode({name: value for name, value in (*asked.items(), ('cursor', cursor)) if value})}"


def runs_page(viewing: Viewing, query: RunsQuery) -> RunsPage:
    """Return one page of the runs that the visitor may see, newest first. Raises InvalidCursor."""
    projects = viewing.principal.projects(None)
    chosen, note = query.filter(projects), ""
    level = next((each for each in RISKS if each == query.risk), None)
    if level is not None:
        at_risk = runs_at_risk(viewing.session, chosen.projects, level)
        chosen = chosen._replace(ids=at_risk.run_ids)
        note = "" if at_risk.searched_all else f"Searched: the newest {MOST_SEARCHED:,} runs with alerts."
    found = list_runs(viewing.session, chosen, query.cursor, RUNS_ON_A_PAGE)
    run_ids = [run.id for run in found.items]
    mismatch = pooled_mismatch(viewing.session, run_ids)
    observed = observed_steps(viewing.session, run_ids)
    states = states_of_runs(viewing.session, run_ids)
    alerts = open_counts(viewing.session, run_ids)
    risks = risks_of_runs(viewing.session, run_ids, observed)
    incomplete = incomplete_counts(viewing.session, run_ids)
    rewards = newest_steps(viewing.session, run_ids, STEP_ROW, ("reward_mean",), REWARD_STEPS)
    return RunsPage(
        runs=[
            _row(
                run,
                mismatch.get(run.id),
                _advice(run, states[run.id], observed.get(run.id)),
                risks[run.id],
                alerts[run.id],
                incomplete.get(run.id, 0),
                _values(rewards.get(run.id, ())),
            )
            for run in found.items
        ],
        filter=RunsFilter(query.search, query.project, query.model, query.state, level or "", STATES, RISKS, note),
        filtered=chosen != RunFilter(projects),
        next_address=query.address(found.next_cursor) if found.next_cursor else None,
        live=query.cursor is None,
    )


def _values(steps: Sequence[MeasuredStep]) -> SteppedValues:
    known: Mapping[int, float] = {
        step.key.step: value for step in steps if (value := step.values["reward_mean"]) is not None
    }
    return SteppedValues(list(known), list(known.values()))


def _row(
    run: RunRead,
    mismatch: PooledMeasure | None,
    advice: str | None,
    risk: Risk,
    alerts: Counter[str],
    incomplete: int,
    reward: SteppedValues,
) -> RunRow:
    fall = reward_fall(reward)
    mean, _, interval = (pooled_in_words(mismatch) or "").partition(" (")
    steps = "1 step incomplete" if incomplete == 1 else f"{incomplete} steps incomplete"
    return RunRow(
        id=run.id,
        name=run.name or run.key,
        address=run_page_path(run.project, run.key),
        project=run.project,
        state=label_of(run.state, RUN_STATES),
        model=run.model,
        trainer=run.trainer,
        engine=run.engine,
        last_step=run.last_step,
        mismatch=mean or None,
        interval=interval.removesuffix(")"),
        reward=number(reward.newest()) if reward.values else None,
        reward_path=sparkline(Curve(reward.steps, reward.values)),
        fall=None if fall is None else Label(f"fell at step {fall.since}", "critical"),
        incomplete=Label(steps, "warning") if incomplete else None,
        advice=advice,
        risk=risk_label(risk),
        alerts=alerts_label(alerts),
        started=moment(run.created_at_us),
    )


def _advice(run: RunRead, state: AdviceState, observed_step: int | None) -> str | None:
    """Return the scale that the advice has for the next step; None before the first closed step."""
    if observed_step is None:
        return None
    shadow = ", shadow" if run.advice_mode == "shadow" else ""
    return f"× {number(state.scale(observed_step + 1))}{shadow}"
