"""Alerts over HTTP: listed newest first, acknowledged, resolved."""

import httpx
import pytest
from fastapi import FastAPI

from tests.service.sending import all_items, problem_of
from tests.service.watch.recorded import K3, RecordedRun


@pytest.fixture
def alarmed(http: httpx.Client, app: FastAPI) -> RecordedRun:
    """A run whose mismatch is critical from the start: three alerts, over HTTP at `http`."""
    run = RecordedRun(app.state.context.database).begin()
    run.close_all({K3: [0.2] * 12}, range(1, 13))
    return run


def test_alerts_are_paged_newest_step_first_and_filtered_by_state(http: httpx.Client, alarmed: RecordedRun) -> None:
    address = f"/v1/runs/{alarmed.run}/alerts"
    everything = http.get(address).raise_for_status().json()
    steps = [alert["step"] for alert in everything["items"]]
    assert steps == sorted(steps, reverse=True)
    assert {alert["rule"] for alert in everything["items"]} == {
        "mismatch_warning", "mismatch_critical", "mismatch_baseline_critical", "mismatch_step",
    }  # fmt: skip
    first = http.get(address, params={"limit": 2}).json()
    rest = http.get(address, params={"limit": 2, "cursor": first["next_cursor"]}).json()
    assert first["items"] + rest["items"] == everything["items"]
    assert http.get(address, params={"state": "open"}).json()["items"] == everything["items"]
    assert http.get(address, params={"state": ["resolved", "retracted"]}).json()["items"] == []
    assert http.get(address, params={"state": "asleep"}).status_code == 422


def test_alert_is_acknowledged_then_resolved(http: httpx.Client, alarmed: RecordedRun) -> None:
    address = f"/v1/runs/{alarmed.run}/alerts"
    alert = http.get(address).json()["items"][0]["id"]
    for _ in range(2):
        acknowledged = http.post(f"{address}/{alert}/acknowledge").raise_for_status().json()
        assert (acknowledged["state"], acknowledged["changed_by"]) == ("acknowledged", "operator")
    for _ in range(2):
        assert http.post(f"{address}/{alert}/resolve").raise_for_status().json()["state"] == "resolved"
    refused = http.post(f"{address}/{alert}/acknowledge")
    assert problem_of(refused) == (409, "alert-conflict")


def test_unknown_alert_is_404(http: httpx.Client, alarmed: RecordedRun) -> None:
    assert http.post(f"/v1/runs/{alarmed.run}/alerts/alert_x/resolve").status_code == 404
    assert http.get("/v1/runs/run_x/alerts").status_code == 404
    other = RecordedRun(alarmed.database).begin("another")
    alert = alarmed.alerts()[0].id
    assert http.post(f"/v1/runs/{other.run}/alerts/{alert}/resolve").status_code == 404


def test_alerts_of_all_runs_are_listed_and_filtered(http: httpx.Client, alarmed: RecordedRun, app: FastAPI) -> None:
    other = RecordedRun(app.state.context.database).begin("another-run", project="another")
    other.close_all({K3: [0.2] * 12}, range(1, 13))
    found = http.get("/v1/alerts").raise_for_status().json()["items"]
    changed = [(alert["changed_at_us"], alert["id"]) for alert in found]
    assert changed == sorted(changed, reverse=True)
    runs = {(alert["run"], alert["run_key"], alert["project"]) for alert in found}
    assert runs == {(alarmed.run, "a-run", "default"), (other.run, "another-run", "another")}
    assert all_items(http, "/v1/alerts", limit=2) == found
    for query, count in (
        ({"project": "another"}, 4),
        ({"project": "nobody"}, 0),
        ({"rule": "mismatch_critical"}, 2),
        ({"severity": "warning", "project": "default"}, 1),
        ({"state": ["resolved", "retracted"]}, 0),
    ):
        assert len(http.get("/v1/alerts", params=query).raise_for_status().json()["items"]) == count, query
    http.post(f"/v1/runs/{other.run}/alerts/{found[-1]['id']}/resolve")
    http.delete(f"/v1/runs/{other.run}").raise_for_status()
    assert {alert["run"] for alert in http.get("/v1/alerts").json()["items"]} == {alarmed.run}
