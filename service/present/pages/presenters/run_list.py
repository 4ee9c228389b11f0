"""The presenter of the list of runs. Its number of queries does not depend on the number of runs."""

from __future__ import annotations

from collections import Counter
from urllib.parse import urlencode

from foreshock.conclusions.health import PooledMeasure
from foreshock.early_warning.advice_state import AdviceState
from foreshock.page_addresses import run_page_path
from service.present.pages.formatting import RUN_STATES, alerts_label, label_of, moment, number
from service.present.pages.presenters.health import pooled_in_words
from service.present.pages.presenters.viewing import Viewing
from service.present.pages.view_models import RunRow, RunsPage
from service.runs.health.service import pooled_mismatch
from service.runs.runs.schemas import RunFilter, RunRead
from service.runs.runs.service import list_runs
from service.watch.advice.service import states_of_runs
from service.watch.alerts.service import open_counts
from service.watch.detection.service import observed_steps

RUNS_ON_A_PAGE = 25


def runs_page(viewing: Viewing, cursor: str | None) -> RunsPage:
    """Return one page of the runs that the visitor may see, newest first. Raises InvalidCursor."""
    found = list_runs(viewing.session, RunFilter(viewing.principal.projects(None)), cursor, RUNS_ON_A_PAGE)
    run_ids = [run.id for run in found.items]
    mismatch = pooled_mismatch(viewing.session, run_ids)
    observed = observed_steps(viewing.session, run_ids)
    states = states_of_runs(viewing.session, run_ids)
    alerts = open_counts(viewing.session, run_ids)
    return RunsPage(
        runs=[
            _row(run, mismatch.get(run.id), _advice(run, states[run.id], observed.get(run.id)), alerts[run.id])
            for run in found.items
        ],
        next_address=f"/?{urlencode({'cursor': found.next_cursor})}" if found.next_cursor else None,
        live=cursor is None,
    )


def _row(run: RunRead, mismatch: PooledMeasure | None, advice: str | None, alerts: Counter[str]) -> RunRow:
    return RunRow(
        name=run.name or run.key,
        address=run_page_path(run.project, run.key),
        project=run.project,
        state=label_of(run.state, RUN_STATES),
        model=run.model,
        trainer=run.trainer,
        engine=run.engine,
        last_step=run.last_step,
        mismatch=pooled_in_words(mismatch),
        advice=advice,
        alerts=alerts_label(alerts),
        started=moment(run.created_at_us),
    )


def _advice(run: RunRead, state: AdviceState, observed_step: int | None) -> str | None:
    """Return the scale that the advice has for the next step; None before the first closed step."""
    if observed_step is None:
        return None
    shadow = ", shadow" if run.advice_mode == "shadow" else ""
    return f"× {number(state.scale(observed_step + 1))}{shadow}"
