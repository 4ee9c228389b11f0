"""The history that detectors replay is what was ingested: measurements of closed steps and their scalars."""

import pytest
from fastapi import FastAPI

from foreshock.diagnosis.detectors import WarningConfiguration
from foreshock.diagnosis.quantities import REWARD_KEY
from foreshock_service.platform.database.tables import Run
from foreshock_service.watch.detection.history import closed_steps_after, watched_as
from tests.service.sending import Sender, make_batch
from tests.service.watch.recorded import K3, RecordedRun

KEYS = WarningConfiguration().keys


def test_history_equals_the_api(sender: Sender, app: FastAPI) -> None:
    for step in (3, 5):
        assert sender.put_shard(step, make_batch(seed=step)).status_code == 201
        assert sender.put_scalars(step, {"grad_norm": 0.5 + step, "reward": 1.0}, source="engine").status_code == 204
        assert sender.put_scalars(step, {"grad_norm": 0.25 + step, "kl": None}).status_code == 204
    columns = sender.get("measurements").json()["columns"]
    expected: dict[int, dict[str, float]] = {3: {"scalars:grad_norm": 3.25}, 5: {"scalars:grad_norm": 5.25}}
    for row, (step, comparison) in enumerate(zip(columns["step"], columns["comparison"], strict=True)):
        for name, values in columns.items():
            key = f"{comparison}:{name}"
            if key in KEYS and values[row] is not None:
                expected[step][key] = values[row]
    with app.state.context.database.read() as session:
        history = closed_steps_after(session, sender.run, -1, watched_as(session, session.get_one(Run, sender.run)), 10)
    assert [(closed.step, attempt) for closed, attempt in history] == [(3, 1), (5, 1)]
    for closed, _ in history:
        assert "trainer/rollout:k3_kl" in closed.values
        assert dict(closed.values) == {key: value for key, value in expected[closed.step].items() if key in KEYS}


def test_late_scalars_reach_the_detectors(sender: Sender) -> None:
    for step in range(1, 15):
        assert sender.put_shard(step, make_batch(seed=step)).status_code == 201
        assert sender.put_scalars(step, {"grad_norm": 0.4 if step <= 10 else 4.0}).status_code == 204
    alerts = {alert["rule"]: alert for alert in sender.get("alerts").json()["items"]}
    assert (alerts["gradient_rise"]["step"], alerts["gradient_rise"]["value"]) == (13, 4.0)
    assert alerts["gradient_rise"]["evidence"]["baseline"] == pytest.approx(0.4)
    # The trainer corrects the value: the alert is retracted.
    assert sender.put_scalars(12, {"grad_norm": 0.4}).status_code == 204
    again = {alert["rule"]: alert["state"] for alert in sender.get("alerts").json()["items"]}
    assert again["gradient_rise"] == "retracted"


def test_reward_and_entropy_of_scalars_are_watched_if_the_rollouts_have_none(recorded: RecordedRun) -> None:
    for step in range(1, 61):
        recorded.log(
            step, {"critic/rewards/mean": 0.6 if step < 40 else 0.0, "actor/entropy": 0.7 if step < 30 else 0.1}
        )
        recorded.close(step, {K3: 1e-4})
    found = {alert.rule: alert.evidence.get("onset_step", alert.step) for alert in recorded.alerts()}
    assert found["reward_collapse"] == 40
    assert "entropy_fall" in found


def test_a_reward_of_the_rollouts_is_preferred_to_that_of_a_scalar(recorded: RecordedRun) -> None:
    for step in range(1, 61):
        recorded.log(step, {"critic/rewards/mean": 0.6 if step < 40 else 0.0})
        recorded.close(step, {K3: 1e-4, REWARD_KEY: 0.6})
    assert recorded.alerts() == []
