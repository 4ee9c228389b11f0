"""Scalars are kept per source and reach the observers of a step whether they come before or after it closes."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from sqlalchemy.orm import Session

from service.app import create_app
from service.platform.context import ClosedStepValues
from service.platform.decoding.pool import DecoderPool
from service.platform.settings import Settings
from tests.service.sending import Sender, make_batch, start_run
from tests.service.server import RunningServer


@pytest.fixture
def seen() -> list[ClosedStepValues]:
    """What an observer was told."""
    return []


@pytest.fixture
def sender(settings: Settings, decoders: DecoderPool, seen: list[ClosedStepValues]) -> Iterator[Sender]:
    """A run in a service with one observer."""

    def observe(_: Session, values: ClosedStepValues) -> None:
        seen.append(values)

    app = create_app(settings, decoders)
    app.state.context = app.state.context.replacing(step_observers=(observe,))
    with RunningServer(app) as server, httpx.Client(base_url=server.url, timeout=60) as http:
        yield start_run(http)


def test_scalars_that_come_first_are_among_the_values_of_the_step_that_closes(
    sender: Sender, seen: list[ClosedStepValues]
) -> None:
    assert sender.put_scalars(5, {"grad_norm": 0.5}).status_code == 204
    assert seen == []
    sender.put_shard(5, make_batch()).raise_for_status()
    assert [(each.step, each.attempt) for each in seen] == [(5, 1)]
    assert seen[0].values["scalars:grad_norm"] == 0.5
    assert seen[0].values["rollout:num_rollouts"] == 6
    assert seen[0].values["trainer/rollout:k3_kl"] > 0


def test_scalars_that_come_late_are_observed_with_all_the_others(sender: Sender, seen: list[ClosedStepValues]) -> None:
    sender.put_shard(5, make_batch()).raise_for_status()
    sender.put_scalars(5, {"grad_norm": 0.5}).raise_for_status()
    assert len(seen) == 2
    assert "scalars:grad_norm" not in seen[0].values
    assert seen[1].values == seen[0].values | {"scalars:grad_norm": 0.5}


def test_what_is_not_a_number_is_kept_as_null_and_not_observed(sender: Sender, seen: list[ClosedStepValues]) -> None:
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


def test_sources_are_kept_apart_and_the_trainers_value_counts(sender: Sender, seen: list[ClosedStepValues]) -> None:
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


def test_an_observer_that_fails_leaves_no_row_of_the_shard(settings: Settings, decoders: DecoderPool) -> None:
    def fail(_: Session, values: ClosedStepValues) -> None:
        raise ArithmeticError(f"step {values.step}")

    app = create_app(settings, decoders)
    app.state.context = app.state.context.replacing(step_observers=(fail,))
    with RunningServer(app) as server, httpx.Client(base_url=server.url, timeout=60) as http:
        sender = start_run(http)
        assert sender.put_shard(0, make_batch()).status_code == 500
        assert sender.get("steps").json()["items"] == []
        assert sender.get("measurements").json()["columns"]["step"] == []


@pytest.mark.parametrize("body", [{}, {"values": {}}, {"values": {"a": "x"}}, {"values": {"": 1}}, {"source": ""}])
def test_scalars_that_make_no_sense_are_refused(sender: Sender, body: dict[str, object]) -> None:
    assert sender.http.put(f"/v1/runs/{sender.run}/steps/0/scalars", json=body).status_code == 422
