"""The risk of a run over HTTP: its level follows the alerts that stand."""

from __future__ import annotations

import httpx
from fastapi import FastAPI

from tests.service.watch.recorded import K3, LENGTH, RecordedRun


def test_risk_follows_the_alerts_that_stand(http: httpx.Client, app: FastAPI) -> None:
    run = RecordedRun(app.state.context.database).begin()
    path = f"/v1/runs/{run.run}/risk"
    before = http.get(path).json()
    assert (before["level"], before["observed_step"]) == ("calm", None)
    run.close_all({LENGTH: [100.0] * 20, K3: [1e-4] * 20}, range(1, 21))
    assert http.get(path).json()["level"] == "calm"
    run.close_all({LENGTH: [100.0] * 20, K3: [2e-2] * 20}, range(21, 41))
    after = http.get(path).json()
    assert (after["level"], after["score"], after["observed_step"]) == ("high", 3, 40)
    assert after["reasons"][0].startswith("Mismatch: ")
    assert "not a probability" in after["note"]
    assert http.get("/v1/runs/run_00000000000000000000000000/risk").status_code == 404
