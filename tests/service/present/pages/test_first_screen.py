"""The first screen of a run shows what was measured, and operators' actions only where they mean something."""

import html
import re
from dataclasses import replace

import httpx
import numpy as np
import pytest
from fastapi import FastAPI
from hypothesis import given
from hypothesis import strategies as st

from foreshock.api.watch import AlertRecord
from foreshock.diagnosis.episodes import episodes_of
from foreshock.learning_rate.decisions import AdviceState
from foreshock.learning_rate.length_decay import POINTS_SENT, Point
from foreshock_service.present.pages.figures import overview
from foreshock_service.present.pages.figures.drawing import scientific, spark_paths
from foreshock_service.present.pages.presenters.advice import lowered_in_words
from tests.service.present.pages.conftest import SentRun, Site, send_run
from tests.service.sending import make_batch, make_mixed_batch, start_run
from tests.service.watch.recorded import LENGTH, RecordedRun


def summary_of(http: httpx.Client, run: SentRun) -> str:
    """Return what the small multiples say to a reader who does not see them."""
    found = http.get(f"/pages/runs/{run.id}/figures/overview.json").raise_for_status().json()
    return str(found.get("summary") or found["missing"])


def test_small_multiples_have_the_newest_values_and_the_extremes_of_all_steps(site: Site) -> None:
    query = {"comparison": "rollout", "measure": ["response_length_mean", "reward_mean"]}
    columns = site.http.get(f"/v1/runs/{site.run.id}/measurements", params=query).json()["columns"]
    summary = summary_of(site.http, site.run)
    for name, values in (("Response length", columns["response_length_mean"]), ("Reward", columns["reward_mean"])):
        low, high = min(values), max(values)
        assert f"{name}: {scientific(values[-1])} at step 12, between {scientific(low)} (step " in summary
        assert f"and {scientific(high)} (step {columns['step'][values.index(high)]})" in summary
    assert "Mismatch, k3: " in summary
    assert "Learning rate ×: 1 at step 12" in summary


def test_thresholds_stand_beside_the_tokens_at_lag_zero(http: httpx.Client) -> None:
    """Of a run with mixed lags: what is judged has the range, what is not has none."""
    run = start_run(http, "mixed lags")
    for step in (10, 11):
        run.put_shard(step, make_mixed_batch(step)).raise_for_status()
    figures = {
        name: http.get(f"/pages/runs/{run.run}/figures/{name}.json").raise_for_status().json()
        for name in ("overview", "mismatch", "tails")
    }
    curves = {trace["name"]: trace["y"] for trace in figures["overview"]["data"]}
    (fresh, whole), names = (curves[f"Mismatch, k3 {of}"] for of in ("at lag 0", "of all tokens")), list(curves)
    assert max(fresh) < 1e-3 < 1e-2 < min(whole)
    axis = {name: place + 1 for place, name in enumerate(names)}["Mismatch, k3 at lag 0"]
    lines = [each for each in figures["overview"]["layout"]["shapes"] if each["type"] == "line"]
    assert {each["yref"] for each in lines} == {f"y{axis}"}
    drawn = {trace["name"]: trace["y"] for trace in figures["mismatch"]["data"]}
    assert drawn == {"trainer/rollout": whole, "trainer/rollout at lag 0": fresh}
    assert "The ranges hold for the line trainer/rollout at lag 0" in figures["mismatch"]["caption"]
    assert "warning" not in str(figures["tails"]["layout"])


def test_reward_that_only_the_trainer_reports_is_shown(http: httpx.Client) -> None:
    run = send_run(http, "reporting", steps=0)
    for step, reward in ((1, 0.25), (2, 0.75)):
        values = {"values": {"train/reward": reward, "custom/mine": 3.5}}
        http.put(f"/v1/runs/{run.id}/steps/{step}/scalars", json=values).raise_for_status()
    assert "Reward: 0.75 at step 2, between 0.25 (step 1) and 0.75 (step 2)." in summary_of(http, run)


def test_every_logged_scalar_is_reachable(http: httpx.Client) -> None:
    run = send_run(http, "custom", steps=1)
    http.put(f"/v1/runs/{run.id}/steps/1/scalars", json={"values": {"custom/a&b": 3.5}}).raise_for_status()
    page = http.get(f"/pages/runs/{run.id}/scalars").raise_for_status().text
    assert re.findall(r'"group">([^<]+)</summary>', page) == ["custom", "without a group"]
    address, _ = re.findall(r'data-figure="([^"]+)"', page)
    assert http.get(html.unescape(address)).json()["data"][0]["y"] == [3.5]
    only = http.get(f"/pages/runs/{run.id}/scalars", params={"name": "NORM gr"}).text
    assert "1 of 2 scalars" in only
    assert re.findall(r'"group">([^<]+)</summary>', only) == ["without a group"]
    assert "None of 2 scalars" in http.get(f"/pages/runs/{run.id}/scalars", params={"name": "zzz"}).text


def test_part_of_the_steps_is_drawn_in_more_detail(http: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overview, "MOST_COLUMNS", 14)
    run = send_run(http, "long", steps=0)
    for step in range(1, 31):
        values = {"values": {"reward": step / 30}}
        http.put(f"/v1/runs/{run.id}/steps/{step}/scalars", json=values).raise_for_status()
    address = f"/pages/runs/{run.id}/figures/overview.json"
    names = [trace["name"] for trace in http.get(address).json()["data"] if trace["name"].startswith("Reward")]
    assert names == ["Reward, least", "Reward, largest", "Reward"]
    part, *_ = http.get(address, params={"from_step": 11, "to_step": 20}).json()["data"]
    assert (part["name"], part["x"]) == ("Reward", list(range(11, 21)))


def test_run_that_has_ended_offers_no_action_on_its_learning_rate(http: httpx.Client) -> None:
    run = send_run(http, "ended", steps=2)
    assert 'name="kind" value="hold"' in http.get(run.address).text
    http.patch(f"/v1/runs/{run.id}", json={"state": "finished"}).raise_for_status()
    assert 'name="kind"' not in http.get(run.address).text


def test_scale_is_drawn_as_it_was_at_every_step_of_a_long_log(http: httpx.Client, app: FastAPI) -> None:
    run = RecordedRun(app.state.context.database).begin()
    for step in range(60):
        run.log(step, {"update_k3": 5e-2 if step // 15 % 2 == 0 else 1e-4})
        run.close(step, {LENGTH: 100.0})
    state = run.advice()
    assert len(state.points) > POINTS_SENT
    assert len(http.get(f"/v1/runs/{run.run}/lr-advice").raise_for_status().json()["points"]) == POINTS_SENT
    scales = [state.scale(step) for step in range(60)]
    assert scales[0] == 1.0 > min(scales)
    figures = f"/pages/runs/{run.run}/figures"
    figure = http.get(f"{figures}/learning-rate.json").raise_for_status().json()
    stairs = dict(zip(figure["data"][0]["x"], figure["data"][0]["y"], strict=True))
    assert [stairs[max(at for at in stairs if at <= step)] for step in range(60)] == scales
    curves = http.get(f"{figures}/overview.json").raise_for_status().json()["data"]
    assert [each["y"] for each in curves if each.get("name") == "Learning rate ×"] == [scales]


def test_sparklines_share_one_scale_and_need_two_points() -> None:
    paths = spark_paths({"low": [(0, 0.0), (59, 1.0)], "high": [(0, 3.0), (59, 4.0)], "one": [(3, 1.0)]})
    assert paths == {"low": "M0 22.0L59 17.0", "high": "M0 7.0L59 2.0"}
    assert spark_paths({"k3": [(0, 0.0), (1, 1e-5)]}, logarithmic=True) == {}


@given(st.lists(st.floats(-1e12, 1e12), min_size=2, max_size=50), st.booleans())
def test_sparkline_stays_inside_its_box(values: list[float], logarithmic: bool) -> None:
    path = spark_paths({"": list(enumerate(values))}, logarithmic=logarithmic).get("", "")
    for _, y in re.findall(r"([\d.]+) (-?[\d.]+)", path):
        assert 0 <= float(y) <= 24


def test_alerts_of_one_cause_are_one_line_with_the_others_folded(http: httpx.Client) -> None:
    run = start_run(http, "one cause", model_kind="dense")
    for step in range(1, 13):
        batch = make_batch(32, seed=step)
        assert batch.rollout_log_probs is not None
        far = batch.rollout_log_probs - np.float32(0.6)
        run.put_shard(step, replace(batch, trainer_log_probs=far)).raise_for_status()
    page = http.get(f"/runs/{run.run}", follow_redirects=True).raise_for_status().text
    found = run.get("alerts", state="open").raise_for_status().json()["items"]
    episodes = episodes_of(AlertRecord(**each) for each in found)
    assert len(found) > len(episodes) > 0
    assert f"{len(found)} open alerts of {len(episodes)} cause" in page
    assert f"{len(episodes[0]) - 1} more of this cause" in page
    first = re.search(r'<summary><span class="badge \w*">(\w+)</span> <strong>', page)
    assert first is not None
    assert first[1] == "critical"


SURGE = Point(115, boundary=198, period=198)


@pytest.mark.parametrize(
    ("state", "said"),
    [
        (AdviceState(), None),
        (AdviceState(points=(SURGE,)), "lowered by the schedule at step 198"),
        (AdviceState(points=(SURGE, Point(250, 2, 396, 198))), "lowered by an operator at step 250"),
        (AdviceState(points=(Point(260, loop=0.7, loop_step=260),)), "lowered by the control loop at step 260"),
    ],
)
def test_the_newest_fall_of_the_scale_is_told_with_who_made_it(state: AdviceState, said: str | None) -> None:
    assert lowered_in_words(state, 300) == said
