"""Pages over several runs: the list with its filters, the comparison, the alerts."""

import html
import json
import re
from dataclasses import replace
from typing import Any
from urllib.parse import urlencode

import httpx
import numpy as np
import pytest

from foreshock.api.diagnosis import VERDICTS
from foreshock.api.records import parse
from foreshock.api.watch import AlertRecord
from foreshock.diagnosis.episodes import episodes_of
from tests.service.present.pages.browsing import Visit
from tests.service.present.pages.conftest import Site, rollouts
from tests.service.sending import Sender, start_run
from tests.waiting import wait_until


def send_falling(http: httpx.Client, key: str, fall_at: int, steps: int, **settings: object) -> str:
    """Send a run whose reward falls from 0.8 to 0.05 at a step, and return its id when the run is advanced."""
    run = http.post("/v1/runs", json={"key": key, "model": "tiny", **settings}).raise_for_status().json()["id"]
    attempt = {"key": "first", "fingerprint": {"rollout": {"engine": key}}}
    http.post(f"/v1/runs/{run}/attempts", json=attempt).raise_for_status()
    for step in range(1, steps + 1):
        batch = rollouts(step, 0.01)
        reward = np.random.default_rng(step).normal(0.8 if step < fall_at else 0.05, 0.01, batch.num_rollouts)
        batch = replace(batch, reward=reward.clip(0.0, 1.0).astype(np.float32))
        Sender(http, run).put_shard(step, batch).raise_for_status()
    wait_until(lambda: not http.get(f"/v1/runs/{run}").raise_for_status().json()["advancing"])
    return str(run)


@pytest.fixture(scope="module")
def fallen(site: Site) -> str:
    """The id of a run whose reward fell at step 12."""
    return send_falling(site.http, "fallen", 12, 26, hardware="a board", trainer="a trainer", engine="an engine")


def names_in(page: str) -> list[str]:
    return re.findall(r"<bdi>([^<]+)</bdi>", page)


def test_list_has_the_diagnosis_of_each_run_and_is_filtered_by_verdict(site: Site, fallen: str) -> None:
    said = site.http.get(f"/v1/runs/{fallen}").raise_for_status().json()["diagnosis"]
    page = site.http.get("/", params={"search": "fallen"}).raise_for_status().text
    assert said["headline"] in html.unescape(page)
    assert 'class="spark"' in page
    for verdict in VERDICTS:
        page = site.http.get("/", params={"search": "fallen", "verdict": verdict}).text
        assert (names_in(page) == ["fallen"]) == (verdict == said["verdict"])
        assert f"<option selected>{verdict}</option>" in page


def test_forty_runs_take_less_than_two_screens(visit: Visit, site: Site, fallen: str) -> None:
    names = [f"a sweep of learning rates, seed {number}" for number in range(40)]
    sweep = [site.http.post("/v1/runs", json={"key": name, "model": "sweep"}).json() for name in names]
    visit.page.set_viewport_size({"width": 1440, "height": 900})
    visit.open(site.url, "/?model=sweep")
    assert visit.page.locator("table.runs tbody tr").count() == len(sweep)
    assert visit.page.evaluate("document.documentElement.scrollHeight / innerHeight") <= 1.6
    for run in sweep:
        site.http.delete(f"/v1/runs/{run['id']}").raise_for_status()


def test_list_is_searched_and_filtered_and_pages_keep_the_filter(site: Site, fallen: str) -> None:
    assert names_in(site.http.get("/", params={"search": "FALL"}).text) == ["fallen"]
    assert "fallen" in names_in(site.http.get("/", params={"model": "tiny", "state": "running"}).text)
    assert names_in(site.http.get("/", params={"model": "another"}).text) == []
    assert "No run matches" in site.http.get("/", params={"state": "failed"}).text
    assert names_in(site.http.get("/", params={"project": "another"}).text) == []
    many = [site.http.post("/v1/runs", json={"key": f"many {number}", "model": "many"}).json() for number in range(51)]
    following = re.search(r'href="([^"]+)" rel="next"', site.http.get("/", params={"model": "many"}).text)
    assert following is not None
    assert names_in(site.http.get(following[1].replace("&amp;", "&")).text) == ["many 0"]
    for run in many:
        site.http.delete(f"/v1/runs/{run['id']}").raise_for_status()


def test_comparison_has_what_differs_and_a_line_for_each_run(site: Site, fallen: str) -> None:
    query = urlencode([("run", site.run.id), ("run", fallen), ("run", fallen)])
    page = site.http.get(f"/compare?{query}").raise_for_status().text
    assert "2 runs compared" in page
    different, _, equal = page.partition("settings are equal")
    for name in ("hardware", "last step", "rollout.engine"):
        assert f'<th scope="row">{name}</th>' in different
    assert '<th scope="row">model</th>' in equal
    figure = site.http.get(f"/pages/compare/reward.json?{query}").json()
    assert [trace["name"] for trace in figure["data"]] == ["a healthy run", "fallen"]
    assert len({json.dumps(trace["line"]["color"]) for trace in figure["data"]}) == 2
    assert "missing" in site.http.get(f"/pages/compare/entropy.json?{query}").json()


def test_comparison_has_the_verdicts_and_since_when_the_runs_are_apart(site: Site, fallen: str) -> None:
    steady = send_falling(site.http, "steady", 99, 26)
    page = html.unescape(site.http.get("/compare", params={"run": [steady, fallen]}).raise_for_status().text)
    for run in (steady, fallen):
        assert site.http.get(f"/v1/runs/{run}").json()["diagnosis"]["headline"] in page
    assert "Reward: apart since step 12; Mismatch per token (k3): not apart." in page
    site.http.delete(f"/v1/runs/{steady}").raise_for_status()


@pytest.mark.parametrize("query", ["", "run=" + "&run=".join(f"run_{at}" for at in range(21))])
def test_comparison_of_no_run_or_too_many_says_what_to_do(site: Site, query: str) -> None:
    answer = site.http.get(f"/compare?{query}")
    assert answer.status_code == 422
    assert "expected 1 to 20 runs" in answer.text


def test_alerts_of_all_runs_are_listed_and_filtered(site: Site, fallen: str) -> None:
    found = site.http.get("/v1/alerts", params={"limit": 200}).raise_for_status().json()["items"]
    page = site.http.get("/alerts").raise_for_status().text
    assert found, "the fall of the reward opens an alert"
    assert "reward collapse" in page
    assert 'href="/runs/default/fallen"' in page
    assert "No such alert" in site.http.get("/alerts", params={"state": "retracted"}).text
    infos = sum(each["severity"] == "info" for each in found)
    query = {"severity": "info", "state": ""}
    assert site.http.get("/alerts", params=query).text.count('data-column="State"') == min(infos, 25)


def test_open_alerts_are_by_run_and_cause_and_those_of_ended_runs_apart(site: Site, fallen: str) -> None:
    over = send_falling(site.http, "over", 12, 26)
    open_alerts = [parse(AlertRecord, each) for each in site.http.get(f"/v1/runs/{over}/alerts").json()["items"]]
    causes = episodes_of(each for each in open_alerts if each.state == "open")
    of_run = 'href="/runs/default/over" title'
    page = site.http.get("/alerts").raise_for_status().text
    assert page.count(of_run) == len(causes)
    site.http.patch(f"/v1/runs/{over}", json={"state": "finished"}).raise_for_status()
    running, ended = site.http.get("/alerts").text.split("Runs that have ended with open alerts: 1")
    assert (running.count(of_run), ended.count(of_run)) == (0, len(causes))
    site.http.delete(f"/v1/runs/{over}").raise_for_status()


@pytest.mark.slow
def test_names_that_a_run_declares_hold_on_every_page(site: Site) -> None:
    """Of a run that has names of its own, what has a well-known name is another number."""
    names = {"reward": "my/score", "lr": "my/rate", "grad_norm": "my/norm", "response_length/mean": "my/length"}
    settings: dict[str, Any] = {"model": "own names", "scalar_names": names, "initial_learning_rate": 1.0}
    plain = start_run(site.http, "well-known names", model="own names").run
    own = start_run(site.http, "own names", **settings, baseline=plain).run
    for step in (1, 2, 3):
        known = {"reward": -5.0, "rewards/mean": -6.0, "lr": -7.0, "grad_norm": 8.0, "response_length/mean": 9.0}
        declared = {"my/score": 0.1 * step, "my/rate": 0.5, "my/norm": 2.0, "my/length": 30.0}
        for run, values in ((own, known | declared), (plain, known)):
            Sender(site.http, run).put_scalars(step, {**values}).raise_for_status()
    wait_until(lambda: not any(each["advancing"] for each in site.http.get("/v1/runs").json()["items"]))
    drawn = {
        "reward": ([0.1, 0.2, 0.30000000000000004], -5),
        "gradient-norm": ([2.0] * 3, 8),
        "length": ([30.0] * 3, 9),
    }
    for figure, (expected, well_known) in drawn.items():
        query = {"run": [own, plain]}
        lines = site.http.get(f"/pages/compare/{figure}.json", params=query).raise_for_status().json()["data"]
        assert [line["y"] for line in lines] == [expected, [well_known] * 3]
    axes = site.http.get(f"/pages/runs/{own}/axes.json").raise_for_status().json()
    assert axes["lr"]["values"] == [0.5, 1.0, 1.5]
    page = site.http.get("/", params={"model": "own names", "sort": "reward"}).raise_for_status().text
    assert names_in(page) == ["own names", "well-known names"]
    rows = [re.sub("<[^>]*>", " ", row) for row in page.split("<tr")[2:]]
    assert ["0.2" in row or "0.3" in row for row in rows] == [True, False]
    assert ["-5" in row.replace("−", "-") for row in rows] == [False, True]


def test_runs_are_ticked_and_compared_with_one_zoom(visit: Visit, site: Site, fallen: str) -> None:
    page = visit.page
    visit.origin = site.url
    page.goto(f"{site.url}/?search=al")
    page.get_by_label("Compare fallen").check()
    page.get_by_label("Compare a healthy run").check()
    page.get_by_role("button", name="Compare 2 ticked runs").click()
    page.wait_for_selector("body[data-drawn=yes]")
    assert page.get_by_role("heading", level=1).inner_text() == "2 runs compared"
    reward, k3 = '[data-figure*="/reward.json"]', '[data-figure*="/k3.json"]'
    assert page.locator(f"{reward} g.trace").count() == 2
    page.evaluate(f"""Plotly.relayout(document.querySelector('{reward}'),
        {{"xaxis.range[0]": 2, "xaxis.range[1]": 6}})""")
    page.wait_for_function(f"() => document.querySelector('{k3}')._fullLayout.xaxis.range[1] === 6")
    assert "from=2" in page.url
    visit.assert_clean()


# PostgreSQL has no NUL in texts.
@pytest.mark.parametrize(
    "path", ["/?search=%00", "/?project=%00", "/?model=a%00", "/compare?run=%00", "/alerts?state=%00"]
)
def test_nul_in_what_a_page_asks_for_is_refused(http: httpx.Client, path: str) -> None:
    assert http.get(path).status_code == 422
