"""Alerts over HTTP: listed newest first, acknowledged, resolved."""

from __future__ import annotations

import httpx
import pytest
from fastapi import FastAPI

from service.platform.context import ClosedStepValues
from service.runs.attempts.repository import of_run
from service.watch.alerts import replay_detectors
from service.watch.alerts.history import closed_steps_after
from tests.service.sending import make_batch, start_run
from tests.service.watch.alerts.recorded import K3, RecordedRun


@pytest.fixture
def alarmed(http: httpx.Client, app: FastAPI) -> RecordedRun:
    """A run whose mismatch is bad from the start: three alerts, over HTTP at `http`."""
    run = RecordedRun(app.state.context.database).begin()
    run.close_all({K3: [2e-2] * 12}, range(1, 13))
    return run


def test_alerts_are_listed_newest_step_first_in_pages_and_by_state(http: httpx.Client, alarmed: RecordedRun) -> None:
    address = f"/v1/runs/{alarmed.run}/alerts"
    everything = http.get(address).raise_for_status().json()
    steps = [alert["step"] for alert in everything["items"]]
    assert steps == sorted(steps, reverse=True)
    assert {alert["rule"] for alert in everything["items"]} == {
        "mismatch_look",
        "mismatch_bad",
        "mismatch_baseline_bad",
    }
    first = http.get(address, params={"limit": 2}).json()
    rest = http.get(address, params={"limit": 2, "cursor": first["next_cursor"]}).json()
    assert first["items"] + rest["items"] == everything["items"]
    assert http.get(address, params={"state": "open"}).json()["items"] == everything["items"]
    assert http.get(address, params={"state": ["resolved", "retracted"]}).json()["items"] == []
    assert http.get(address, params={"state": "asleep"}).status_code == 422


def test_an_alert_is_acknowledged_then_resolved(http: httpx.Client, alarmed: RecordedRun) -> None:
    address = f"/v1/runs/{alarmed.run}/alerts"
    alert = http.get(address).json()["items"][0]["id"]
    for _ in range(2):
        acknowledged = http.post(f"{address}/{alert}/acknowledge").raise_for_status().json()
        assert (acknowledged["state"], acknowledged["changed_by"]) == ("acknowledged", "operator")
    for _ in range(2):
        assert http.post(f"{address}/{alert}/resolve").raise_for_status().json()["state"] == "resolved"
    refused = http.post(f"{address}/{alert}/acknowledge")
    assert refused.status_code == 409
    assert refused.json()["type"] == "urn:foreshock:problem:alert-conflict"


def test_what_is_not_there_is_not_found(http: httpx.Client, alarmed: RecordedRun) -> None:
    assert http.post(f"/v1/runs/{alarmed.run}/alerts/alert_x/resolve").status_code == 404
    assert http.get("/v1/runs/run_x/alerts").status_code == 404
    other = RecordedRun(alarmed.database).begin("another")
    alert = alarmed.alerts()[0].id
    assert http.post(f"/v1/runs/{other.run}/alerts/{alert}/resolve").status_code == 404


def test_the_detectors_read_back_exactly_what_ingestion_tells_them(http: httpx.Client, app: FastAPI) -> None:
    context, told = app.state.context, list[ClosedStepValues]()
    object.__setattr__(context, "step_observers", (lambda _, closed: told.append(closed), *context.step_observers))
    run = start_run(http)
    for step in (3, 5):
        assert run.put_shard(step, make_batch(seed=step)).status_code == 201
        assert run.put_scalars(step, {"grad_norm": 0.5 + step, "reward": 1.0}, source="engine").status_code == 204
        assert run.put_scalars(step, {"grad_norm": 0.25 + step, "kl": None}).status_code == 204
    newest = {closed.step: closed.values for closed in told}
    keys = replay_detectors.CONFIGURATION.keys
    with context.database.read() as session:
        history = closed_steps_after(session, run.run, of_run(session, run.run), -1, keys)
    assert [closed.step for closed, _ in history] == [3, 5]
    for closed, attempt in history:
        assert attempt == 1
        assert closed.values == {key: value for key, value in newest[closed.step].items() if key in keys}
        assert closed.values["scalars:grad_norm"] == 0.25 + closed.step
        assert "trainer/rollout:k3_kl" in closed.values


def test_scalars_that_follow_their_step_are_watched_too(http: httpx.Client) -> None:
    run = start_run(http)
    for step in range(1, 15):
        assert run.put_shard(step, make_batch(seed=step)).status_code == 201
        assert run.put_scalars(step, {"grad_norm": 0.4 if step <= 10 else 4.0}).status_code == 204
    alerts = {alert["rule"]: alert for alert in run.get("alerts").json()["items"]}
    assert (alerts["gradient_rise"]["step"], alerts["gradient_rise"]["value"]) == (13, 4.0)
    assert alerts["gradient_rise"]["evidence"]["baseline"] == pytest.approx(0.4)
    # The trainer corrects what it said: the alert never was.
    assert run.put_scalars(12, {"grad_norm": 0.4}).status_code == 204
    again = {alert["rule"]: alert["state"] for alert in run.get("alerts").json()["items"]}
    assert again["gradient_rise"] == "retracted"
