"""The page of runs."""

from __future__ import annotations

from urllib.parse import urlencode

from service.present.pages.formatting import RUN_STATES, alerts_label, label_of, moment, number
from service.present.pages.presenters.advice import advice_in_words, advice_of
from service.present.pages.presenters.curves import curves_of
from service.present.pages.presenters.viewing import Viewing
from service.present.pages.view_models import RunRow, RunsPage
from service.runs.runs.schemas import RunRead
from service.runs.runs.service import list_runs
from service.watch.alerts.service import open_alerts

RUNS_ON_A_PAGE = 25
WHOLE = "trainer/rollout"
# The newest step may still be open: its mismatch is that of the newest closed one.
STEPS_BACK = 20


def runs_page(viewing: Viewing, cursor: str | None) -> RunsPage:
    """One page of the runs that this guest may see, newest first; raises InvalidCursor."""
    found = list_runs(viewing.session, viewing.principal, None, cursor, RUNS_ON_A_PAGE)
    older = f"/?{urlencode({'cursor': found.next_cursor})}" if found.next_cursor else None
    return RunsPage(
        runs=[_row(viewing, run) for run in found.items],
        next_address=older,
        live=cursor is None,
    )


def _row(viewing: Viewing, run: RunRead) -> RunRow:
    return RunRow(
        name=run.name or run.key,
        address=f"/runs/{run.id}",
        project=run.project,
        state=label_of(run.state, RUN_STATES),
        model=run.model,
        trainer=run.trainer,
        engine=run.engine,
        last_step=run.last_step,
        mismatch=_newest_mismatch(viewing, run),
        advice=advice_in_words(advice_of(viewing, run.id)),
        alerts=alerts_label([alert.severity for alert in open_alerts(viewing.session, run.id)]),
        started=moment(run.created_at_us),
    )


def _newest_mismatch(viewing: Viewing, run: RunRead) -> str | None:
    if run.last_step is None:
        return None
    found = curves_of(viewing, run.id, ("k3_kl",), (WHOLE,), from_step=max(run.last_step - STEPS_BACK, 0))
    last = found[WHOLE]["k3_kl"].last() if WHOLE in found else None
    return None if last is None else number(last[1])
