"""Pages read the database a constant number of times for any number of runs, and never write to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from sqlalchemy import Engine, event

from foreshock_service.platform.logs import current_request_id
from foreshock_service.present.pages.presenters.figures import CHOSEN_STEP_PLOTS, RUN_PLOTS, STEP_PLOTS
from tests.service.present.pages.conftest import SentRun, replay, send_run
from tests.service.sending import Sender


@contextmanager
def statements() -> Iterator[list[str]]:
    """Collect the SQL statements of requests; what the service does in the background meanwhile has no request id."""
    executed: list[str] = []

    def note(connection: Any, cursor: Any, statement: str, *rest: Any) -> None:
        if current_request_id() is not None:
            executed.append(statement)

    event.listen(Engine, "before_cursor_execute", note)
    try:
        yield executed
    finally:
        event.remove(Engine, "before_cursor_execute", note)


def addresses_of(run: SentRun, step: int) -> list[str]:
    """Return the address of every page and part of a run and one of its steps."""
    of_step = f"/pages/runs/{run.id}/steps/{step}"
    figures = [f"/pages/runs/{run.id}/figures/{name}.json" for name in RUN_PLOTS]
    figures += [f"{of_step}/figures/{name}.json" for name in (*STEP_PLOTS, *CHOSEN_STEP_PLOTS)]
    parts = [f"{of_step}/tokens", f"{of_step}/corrections"]
    return ["/", "/login", run.address, f"{run.address}/steps/{step}", *figures, *parts]


def test_the_number_of_queries_does_not_depend_on_the_number_of_runs(http: httpx.Client) -> None:
    def executed_for_list() -> int:
        with statements() as executed:
            page = http.get("/").raise_for_status().text
        assert page.count('data-column="k3"') == runs
        return len(executed)

    counts = []
    runs = 0
    for more in (1, 5):
        for _ in range(more):
            send_run(http, f"run {runs}", steps=2, noise=0.4)
            runs += 1
        # The first request after a change may fill a cache.
        counts.append(min(executed_for_list() for _ in range(3)))
    assert counts[0] == counts[1] <= 12, counts


def test_the_list_shows_the_mismatch_pooled_over_the_newest_active_steps(http: httpx.Client) -> None:
    run = send_run(http, "resumed", steps=3)
    sender = Sender(http, run.id)

    def shown() -> float:
        page = http.get("/").raise_for_status().text
        _, _, rest = page.partition('data-column="k3">')
        return float(rest.partition("<span>")[2].partition("<")[0])

    def pooled(steps: int) -> float:
        query = {"comparison": "trainer/rollout", "measure": ["k3_kl", "tokens"], "to_step": steps}
        columns = sender.get("measurements", **query).json()["columns"]
        k3, tokens = columns["k3_kl"], columns["tokens"]
        return float(sum(a * b for a, b in zip(k3, tokens, strict=True)) / sum(tokens))

    assert shown() == pytest.approx(pooled(3), rel=0.01)
    # Step 3 is superseded, and the new attempt has measured nothing yet.
    sender.new_attempt("again", resume_step=3)
    assert shown() == pytest.approx(pooled(2), rel=0.01)


def test_no_page_writes(http: httpx.Client, app: FastAPI, monkeypatch: pytest.MonkeyPatch) -> None:
    run = send_run(http, "replayed", steps=3)
    replay(http, run, step=3)
    # New rollouts make the attribution of the step stale: not even then does a page compute and store it.
    written: list[Callable[..., object]] = []
    monkeypatch.setattr(app.state.context.database, "write", written.append)
    for address in addresses_of(run, 3):
        with statements() as executed:
            http.get(address).raise_for_status()
        assert written == [], address
        changing = [each for each in executed if each.split()[0].upper() in ("INSERT", "UPDATE", "DELETE")]
        assert changing == [], address
