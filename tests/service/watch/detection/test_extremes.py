"""Extreme scalars and detectors that raise, through the whole service: one run's trouble stops no other."""

import httpx
import pytest

from foreshock.diagnosis import detectors
from foreshock.diagnosis.detectors import ClosedStep, WarningConfiguration, WarningState, advance
from foreshock.diagnosis.rule import Event
from tests.service.sending import Sender, start_run

pytestmark = pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)

NAMES = ("reward", "response_length/mean", "actor/grad_norm", "lr", "anything")


def rules_of(run: Sender) -> set[str]:
    return {alert["rule"] for alert in run.get("alerts").raise_for_status().json()["items"]}


def logged(run: Sender, steps: range, extreme: float | None = None) -> None:
    for step in steps:
        values = dict.fromkeys(NAMES, 0.5) if extreme is None else dict.fromkeys(NAMES, extreme)
        run.put_scalars(step, {**values, "response_length/mean": extreme or 300.0}).raise_for_status()


@pytest.mark.parametrize("extreme", [1e300, -1e300, 1.7e308])
def test_an_extreme_scalar_is_stored_and_named_and_later_steps_go_on(http: httpx.Client, extreme: float) -> None:
    run, other = start_run(http, "extreme"), start_run(http, "other")
    logged(run, range(1, 4))
    logged(run, range(4, 5), extreme)
    for each in (run, other):
        logged(each, range(5, 8))
    read = run.get("scalars").raise_for_status().text
    assert f"{extreme:g}".replace("+", "") in read.replace("+", "") or str(extreme) in read
    assert rules_of(run) == {"value_refused"}
    sentence = next(each["sentence"] for each in run.get("diagnosis").json()["events"])
    assert "4" in sentence
    assert rules_of(other) == set()
    assert other.get("diagnosis").json()["observed_step"] == run.get("diagnosis").json()["observed_step"] == 6


def test_a_detector_that_raises_stops_its_own_run_visibly(http: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    def raising(
        state: WarningState, closed: ClosedStep, configuration: WarningConfiguration
    ) -> tuple[WarningState, tuple[Event, ...]]:
        if closed.values.get("rollout:reward_mean") == -7.0:
            raise ZeroDivisionError("a detector's mistake")
        return advance(state, closed, configuration)

    monkeypatch.setattr(detectors, "advance", raising)
    run, other = start_run(http, "raising"), start_run(http, "other")
    for each, reward in ((run, -7.0), (other, 0.5)):
        logged(each, range(1, 4))
        each.put_scalars(4, {"reward": reward}).raise_for_status()
        logged(each, range(5, 9))
    (alert,) = run.get("alerts").json()["items"]
    assert (alert["rule"], alert["severity"], alert["step"]) == ("detection_stopped", "warning", 4)
    assert "ZeroDivisionError: a detector's mistake" in alert["why"]
    found = run.get("diagnosis").json()
    assert found["verdict"] == "warning"
    assert "detection stopped at step 4" in found["headline"]
    assert rules_of(other) == set()
    assert other.get("diagnosis").json()["observed_step"] == 7
