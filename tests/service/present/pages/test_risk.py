"""The risk of a run on its page and in the list of runs."""

from __future__ import annotations

import re

import httpx
import pytest
from fastapi import FastAPI

from foreshock.diagnosis.risk import NO_PROBABILITY
from foreshock_service.watch.risk import service
from tests.service.present.pages.test_lists import names_in
from tests.service.present.pages.test_queries import statements
from tests.service.watch.recorded import K3, LENGTH, RecordedRun


def watched(app: FastAPI, key: str, k3: float) -> RecordedRun:
    """Return a run whose k3 is `k3` after twenty healthy steps."""
    run = RecordedRun(app.state.context.database).begin(key)
    values = {LENGTH: [100.0] * 40, K3: [1e-4] * 20 + [k3] * 20, "trainer/rollout:tokens": [1000.0] * 40}
    run.close_all(values, range(1, 41))
    return run


def test_strip_of_a_run_shows_the_level_and_its_reasons(http: httpx.Client, app: FastAPI) -> None:
    run = watched(app, "ill", 2e-2)
    read = http.get(f"/v1/runs/{run.run}/risk").raise_for_status().json()
    page = http.get(f"/runs/{run.run}").raise_for_status().text
    strip = page.partition('data-part="health"')[2].partition('class="tiles"')[0]
    assert f'<span class="badge critical">risk: {read["level"]}</span>' in strip
    assert read["reasons"]
    assert all(reason in strip for reason in read["reasons"])
    assert NO_PROBABILITY in strip.partition("<details>")[2], "behind the summary"


def test_list_shows_the_level_and_is_filtered_by_it(http: httpx.Client, app: FastAPI) -> None:
    watched(app, "ill", 2e-2)
    watched(app, "well", 1e-4)
    page = http.get("/").raise_for_status().text
    levels = re.findall(r'data-column="Risk"><span class="badge ?([a-z]*)">([a-z]+)<', page)
    assert sorted(zip(names_in(page), levels, strict=True)) == [("ill", ("critical", "high")), ("well", ("", "calm"))]
    for level in ("watch", "elevated", "high"):
        assert names_in(http.get("/", params={"risk": level}).text) == ["ill"], level
    assert "No run matches" in http.get("/", params={"risk": "critical"}).text
    assert len(names_in(http.get("/", params={"risk": "calm"}).text)) == 2, "every run is at least calm"
    assert names_in(http.get("/", params={"risk": "high", "project": "another"}).text) == []
    assert "<option selected>high</option>" in http.get("/", params={"risk": "high"}).text


def test_filter_costs_three_queries_for_any_number_of_runs(http: httpx.Client, app: FastAPI) -> None:
    def executed(**query: str) -> int:
        counts = []
        for _ in range(3):
            with statements() as found:
                assert names_in(http.get("/", params=query).text)
            counts.append(len(found))
        # The first request after a change may fill a cache.
        return min(counts)

    for more in (1, 3):
        for number in range(more):
            watched(app, f"ill {more} {number}", 2e-2)
        assert executed(risk="high") == executed() + 3


def test_list_says_if_it_searched_some_runs_only(
    http: httpx.Client, app: FastAPI, monkeypatch: pytest.MonkeyPatch
) -> None:
    for key in ("first", "second"):
        watched(app, key, 2e-2)
    assert "Searched:" not in http.get("/", params={"risk": "high"}).text
    monkeypatch.setattr(service, "MOST_SEARCHED", 1)
    page = http.get("/", params={"risk": "high"}).text
    assert names_in(page) == ["second"]
    assert "Searched: the newest" in page


def test_every_run_is_at_least_calm_so_the_level_is_refused(app: FastAPI) -> None:
    with app.state.context.database.read() as session, pytest.raises(ValueError, match="got 'calm'"):
        service.runs_at_risk(session, (), "calm")
