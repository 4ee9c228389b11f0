"""Scalars: kept per source, and passed to the detectors before and after the step closes."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

import httpx
import pytest
from fastapi import FastAPI
from sqlalchemy.orm import Session

from foreshock.diagnosis.detectors import WarningConfiguration
from foreshock_service.runs.events import ScalarsLogged, StepClosed, StepEvent
from foreshock_service.watch.detection.history import WatchedRun, closed_steps_after
from tests.service.sending import Sender, make_batch, problem_of

KEYS = ("scalars:grad_norm", "scalars:loss", "scalars:entropy", "rollout:response_length_mean", "trainer/rollout:k3_kl")
WATCHED = WatchedRun(
    WarningConfiguration(), "digest", KEYS, scalars_only=False, declared={}, names=("entropy", "grad_norm", "loss")
)


@dataclass(frozen=True)
class Seen:
    """Event, and the values of its step that a handler reads in the same transaction."""

    event: StepEvent
    values: Mapping[str, float]


@pytest.fixture
def seen() -> list[Seen]:
    return []


@pytest.fixture
def app(app: FastAPI, seen: list[Seen]) -> FastAPI:
    """The application with one handler for each event of a closed step."""

    def note(session: Session, event: StepEvent) -> None:
        history = closed_steps_after(session, event.run_id, event.step - 1, WATCHED, 10)
        if history:
            seen.append(Seen(event, history[0][0].values))

    for event_type in (StepClosed, ScalarsLogged):
        app.state.context.events.subscribe(event_type, note)
    return app


def test_scalars_before_step_closes_are_among_its_values(sender: Sender, seen: list[Seen]) -> None:
    assert sender.put_scalars(5, {"grad_norm": 0.5}).status_code == 204
    assert seen == []
    sender.put_shard(5, make_batch()).raise_for_status()
    assert [each.event for each in seen] == [StepClosed(sender.run, 1, 5)]
    assert seen[0].values["scalars:grad_norm"] == 0.5
    assert seen[0].values["rollout:response_length_mean"] > 0
    assert seen[0].values["trainer/rollout:k3_kl"] > 0


def test_late_scalars_publish_event_and_join_step_values(sender: Sender, seen: list[Seen]) -> None:
    sender.put_shard(5, make_batch()).raise_for_status()
    sender.put_scalars(5, {"grad_norm": 0.5}).raise_for_status()
    changed = ScalarsLogged(sender.run, 1, 5, frozenset({"grad_norm"}))
    assert [each.event for each in seen] == [StepClosed(sender.run, 1, 5), changed]
    assert "scalars:grad_norm" not in seen[0].values
    assert seen[1].values == {**seen[0].values, "scalars:grad_norm": 0.5}


def test_non_finite_value_is_stored_as_null_and_not_read(sender: Sender, seen: list[Seen]) -> None:
    for literal in ("null", "NaN", "Infinity", "-Infinity", "1e999"):
        answer = sender.http.put(
            f"/v1/runs/{sender.run}/steps/0/scalars",
            content=f'{{"values": {{"{literal}": {literal}, "loss": 1}}}}',
            headers={"Content-Type": "application/json"},
        )
        assert answer.status_code == 204
    sender.put_shard(0, make_batch()).raise_for_status()
    assert {name for name in seen[0].values if name.startswith("scalars:")} == {"scalars:loss"}
    columns = sender.get("scalars").json()["columns"]
    assert sorted(zip(columns["name"], columns["value"], strict=True))[-1] == ("null", None)
    assert columns["value"].count(None) == 5


def test_trainer_value_is_preferred_among_sources(sender: Sender, seen: list[Seen]) -> None:
    sender.put_scalars(0, {"loss": 1.0, "entropy": 2.0}, "engine").raise_for_status()
    sender.put_scalars(0, {"loss": 3.0}, "trainer").raise_for_status()
    sender.put_scalars(0, {"loss": 4.0}, "trainer").raise_for_status()
    sender.put_shard(0, make_batch()).raise_for_status()
    assert seen[-1].values["scalars:loss"] == 4.0
    assert seen[-1].values["scalars:entropy"] == 2.0
    columns = sender.get("scalars", source="engine").json()["columns"]
    assert dict(zip(columns["name"], columns["value"], strict=True)) == {"loss": 1.0, "entropy": 2.0}
    assert sender.get("scalars", name=["loss"]).json()["columns"]["source"] == ["engine", "trainer"]
    assert sender.get("scalars", from_step=1).json()["columns"]["step"] == []


def test_failing_handler_rolls_back_shard(app: FastAPI, sender: Sender) -> None:
    def fail(_: Session, closed: StepClosed) -> None:
        raise ArithmeticError(f"step {closed.step}")

    app.state.context.events.subscribe(StepClosed, fail)
    assert sender.put_shard(0, make_batch()).status_code == 500
    assert sender.get("steps").json()["items"] == []
    assert sender.get("measurements").json()["columns"]["step"] == []


@pytest.mark.settings(max_answer_values=5 * 60)
def test_answer_beyond_the_cap_is_refused_and_down_sampling_fits(sender: Sender) -> None:
    for step in range(40):
        values: dict[str, float | None] = {"loss": 9.0 if step == 17 else 1.0, "entropy": -step}
        sender.put_scalars(step, values).raise_for_status()
    refused = sender.get("scalars")
    assert problem_of(refused) == (422, "answer-too-large")
    assert "FORESHOCK_MAX_ANSWER_VALUES" in refused.json()["detail"]
    assert sender.get("scalars", name=["loss"]).json()["columns"]["step"] == list(range(40))
    assert sender.get("scalars", from_step=20).status_code == 200
    columns = sender.get("scalars", max_points=10).json()["columns"]
    assert 17 in [step for step, name in zip(columns["step"], columns["name"], strict=True) if name == "loss"]
    assert columns["step"].count(39) == 2
    assert len(columns["step"]) <= 20


@pytest.mark.settings(max_answer_values=5 * 60)
def test_run_whose_curves_exceed_one_answer_has_its_page_and_its_report(sender: Sender, http: httpx.Client) -> None:
    for step in range(40):
        sender.put_scalars(step, {"reward": 0.5, "entropy": 1.0, "grad_norm": 1.0}).raise_for_status()
    report = http.get(f"/pages/runs/{sender.run}/text").raise_for_status().text
    assert re.search(r"^  Entropy +▄+ +1$", report, re.MULTILINE)
    figure = http.get(f"/pages/runs/{sender.run}/figures/overview.json").raise_for_status().json()
    assert [each["x"] for each in figure["data"] if each.get("y") == [0.5] * 40]
