"""The tiles of a run's first screen show what was measured, and operators' actions only where they mean something."""

from __future__ import annotations

import re
import statistics

import httpx
from hypothesis import given
from hypothesis import strategies as st

from foreshock_service.present.pages.figures import Curve
from foreshock_service.present.pages.figures.drawing import HEIGHT, WIDTH, sparkline
from foreshock_service.present.pages.rendering import number
from foreshock_service.runs.measurements import POOLED_STEPS
from tests.service.present.pages.conftest import STEPS, SentRun, Site, send_run


def tiles_of(http: httpx.Client, run: SentRun) -> dict[str, tuple[str, str]]:
    """Return the value and the note of each tile, by its title."""
    page = http.get(run.address).raise_for_status().text
    found = re.findall(r'<h2>(?:<a [^>]*>)?([^<]+)<.*?class="value">([^<]*)<.*?class="note">([^<]*)<', page, re.S)
    return {title: (value, note) for title, value, note in found}


def points(path: str) -> list[tuple[float, float]]:
    """Return the points of a path."""
    return [(float(x), float(y)) for x, y in re.findall(r"([\d.]+) (-?[\d.]+)", path)]


def test_tiles_have_the_median_of_the_newest_steps_and_the_extremes_of_all(site: Site) -> None:
    query = {"comparison": "rollout", "measure": ["response_length_mean", "reward_mean"]}
    columns = site.http.get(f"/v1/runs/{site.run.id}/measurements", params=query).json()["columns"]
    tiles = tiles_of(site.http, site.run)
    lengths = columns["response_length_mean"]
    value, note = tiles["Response length"]
    assert value == f"{number(statistics.median(lengths[-POOLED_STEPS:]))} tokens"
    assert note.startswith(number(min(lengths)))
    assert f" to {number(max(lengths))} (step " in note
    assert tiles["Reward"][0] == number(statistics.median(columns["reward_mean"][-POOLED_STEPS:]))
    assert tiles["Data"] == ("complete", f"newest step {STEPS}")
    assert tiles["Mismatch, k3"][0] != "not measured"
    assert "healthy 1e-5 to 1e-3" in tiles["Mismatch, k3"][1]
    assert tiles["Learning rate"][0].startswith("× ")


def test_tiles_of_a_run_without_a_step_say_so(http: httpx.Client) -> None:
    tiles = tiles_of(http, send_run(http, "empty", steps=0))
    assert tiles["Mismatch, k3"][0] == "not measured"
    assert tiles["Reward"][0] == "not logged"
    assert tiles["Learning rate"][0] == "no advice yet"
    assert tiles["Data"] == ("none", "no step yet")


def test_reward_that_only_the_trainer_reports_has_a_tile(http: httpx.Client) -> None:
    run = send_run(http, "reporting", steps=0)
    for step, reward in ((1, 0.25), (2, 0.75)):
        values = {"values": {"train/reward": reward}}
        http.put(f"/v1/runs/{run.id}/steps/{step}/scalars", json=values).raise_for_status()
    assert tiles_of(http, run)["Reward"] == (number(0.5), f"{number(0.25)} (step 1) to {number(0.75)} (step 2)")


def test_run_that_has_ended_offers_no_action_on_its_learning_rate(http: httpx.Client) -> None:
    run = send_run(http, "ended", steps=2)
    assert 'name="kind" value="hold"' in http.get(run.address).text
    http.patch(f"/v1/runs/{run.id}", json={"state": "finished"}).raise_for_status()
    assert 'name="kind"' not in http.get(run.address).text


def test_sparkline_keeps_the_peak_of_a_long_run_and_needs_two_points() -> None:
    values: list[float | None] = [1.0] * 20_000
    values[7_000] = 5.0
    drawn = points(sparkline(Curve(range(20_000), values)))
    assert len(drawn) < 3 * WIDTH
    assert min(y for _, y in drawn) < HEIGHT / 4
    assert sparkline(Curve([1], [1.0])) == ""
    assert sparkline(Curve([1, 2], [0.0, 1e-5]), logarithmic=True) == ""


@given(st.lists(st.floats(-1e12, 1e12), min_size=2, max_size=50), st.booleans())
def test_sparkline_stays_inside_its_box(values: list[float], logarithmic: bool) -> None:
    for x, y in points(sparkline(Curve(range(len(values)), values), logarithmic=logarithmic)):
        assert 0 <= x <= WIDTH
        assert 0 <= y <= HEIGHT
