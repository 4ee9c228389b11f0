"""Pages read the database a constant number of times for any number of runs, and never write to it."""

from collections.abc import Callable

import httpx
import pytest
from fastapi import FastAPI

from foreshock_service.platform.logs import current_request_id
from foreshock_service.present.pages.presenters.figures import BUCKET_PLOTS, RUN_PLOTS, STEP_PLOTS
from tests.service.present.pages.conftest import SentRun, replay, send_run
from tests.service.statements import executed


def is_requested() -> bool:
    """Return whether this is a request: what the service does in the background meanwhile has no request id."""
    return current_request_id() is not None


def addresses_of(run: SentRun, step: int) -> list[str]:
    """Return the address of every page and part of a run and one of its steps."""
    of_step = f"/pages/runs/{run.id}/steps/{step}"
    figures = [f"/pages/runs/{run.id}/figures/{name}.json" for name in RUN_PLOTS]
    figures += [f"{of_step}/figures/{name}.json" for name in {**STEP_PLOTS, **BUCKET_PLOTS}]
    parts = [f"{of_step}/tokens", f"{of_step}/corrections"]
    return ["/", "/login", run.address, f"{run.address}/steps/{step}", *figures, *parts]


def test_the_number_of_queries_does_not_depend_on_the_number_of_runs(http: httpx.Client) -> None:
    def executed_for_list() -> int:
        with executed(is_requested) as seen:
            page = http.get("/").raise_for_status().text
        assert page.count('data-column="k3"') == runs
        return len(seen)

    counts = []
    runs = 0
    for more in (1, 5):
        for _ in range(more):
            send_run(http, f"run {runs}", steps=2, noise=0.4)
            runs += 1
        # The first request after a change may fill a cache.
        counts.append(min(executed_for_list() for _ in range(3)))
    assert counts[0] == counts[1] <= 12, counts


def test_no_page_writes(http: httpx.Client, app: FastAPI, monkeypatch: pytest.MonkeyPatch) -> None:
    run = send_run(http, "replayed", steps=3)
    replay(http, run, step=3)
    # New rollouts make the attribution of the step stale: not even then does a page compute and store it.
    written: list[Callable[..., object]] = []
    monkeypatch.setattr(app.state.context.database, "write", written.append)
    for address in addresses_of(run, 3):
        with executed(is_requested) as seen:
            http.get(address).raise_for_status()
        assert written == [], address
        changing = [each for each, _ in seen if each.split()[0].upper() in ("INSERT", "UPDATE", "DELETE")]
        assert changing == [], address
