"""Curves: unknown names are refused with a suggestion, and what is kept of a run is what is stored."""

from __future__ import annotations

from random import Random
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from sqlalchemy import select

from foreshock.comparisons import TRAINER_ROLLOUT
from foreshock_service.platform.database.tables import NewestMeasurement
from foreshock_service.platform.security import UNRESTRICTED
from foreshock_service.runs.curves import CurveQuery, read_curves
from tests.service.sending import Sender, make_batch, start_run


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_similar_name_is_suggested(http: httpx.Client) -> None:
    sender = start_run(http)
    sender.put_shard(1, make_batch()).raise_for_status()
    for path, problem, suggested in (
        ("measurements?measure=k3_lk", "unknown-measure", "k3_kl"),
        ("measurements?comparison=trainer/rollot", "unknown-comparison", "trainer/rollout"),
        ("steps/1/buckets?comparison=trainr/rollout", "unknown-comparison", "trainer/rollout"),
        ("steps/1/tokens?comparison=torch.float23/rollout", "unknown-comparison", "torch.float32/rollout"),
        ("steps/1/corrections?comparison=trainerrollout", "unknown-comparison", "trainer/rollout"),
        ("steps/1/theory?comparison=trainer/rollouts", "unknown-comparison", "trainer/rollout"),
    ):
        answer = http.get(f"/v1/runs/{sender.run}/{path}")
        assert answer.status_code == 422
        assert answer.json()["type"] == f"urn:foreshock:problem:{problem}"
        assert f"did you mean {suggested!r}?" in answer.json()["detail"]


def test_known_comparison_without_data_is_not_an_error_of_the_name(http: httpx.Client) -> None:
    sender = start_run(http)
    sender.put_shard(1, make_batch()).raise_for_status()
    assert sender.get("measurements", comparison="torch.float32/vllm.prefill").json()["columns"]["step"] == []
    assert sender.get("steps/1/buckets", comparison="torch.float32/vllm.prefill@rebatched").status_code == 404


@pytest.mark.parametrize("seed", range(2))
def test_rows_that_are_kept_equal_the_stored_ones_whatever_was_written(http: httpx.Client, seed: int) -> None:
    random, first = Random(seed), start_run(http)
    senders, opened = [first], list[tuple[Sender, int]]()
    known: set[tuple[int, int]] = set()

    def curves(**query: int) -> Any:
        asked = {"comparison": TRAINER_ROLLOUT, "measure": ["k3_kl", "tokens"]}
        return first.get("measurements", **asked, **query).raise_for_status().json()["columns"]

    def put(sender: Sender, step: int, shard: int = 0, shards: int = 1) -> None:
        batch = make_batch(seed=random.randrange(10**6), prefix=f"{sender.attempt}-{step}-{shard}")
        sender.put_shard(step, batch, shard, shards).raise_for_status()
        known.add((sender.attempt, step))

    for number in range(40):
        sender, step = random.choice(senders), random.randrange(30)
        action = random.choice(["newer step", "newer step", "any step", "first shard", "last shard", "resume"])
        if action == "newer step":
            put(senders[-1], 30 + number)
        elif action == "any step" and (sender.attempt, step) not in known:
            put(sender, step)
        elif action == "first shard" and (sender.attempt, step) not in known:
            put(sender, step, 0, 2)
            opened.append((sender, step))
        elif action == "last shard" and opened:
            put(*opened.pop(), 1, 2)
        elif action == "resume":
            body = {"key": f"{number}", "resume_step": step, "age_seconds": random.choice([0.0, 3600.0])}
            made = http.post(f"/v1/runs/{first.run}/attempts", json=body).raise_for_status().json()
            senders.append(Sender(http, first.run, made["attempt"]))
        # A range that ends is read from the database.
        assert curves() == curves(to_step=10**6), (number, action)


def test_request_with_an_older_snapshot_does_not_spoil_what_is_kept(http: httpx.Client, app: FastAPI) -> None:
    first, context = start_run(http), app.state.context
    asked = {"comparison": TRAINER_ROLLOUT, "measure": "k3_kl"}
    for step in range(3):
        first.put_shard(step, make_batch(seed=step)).raise_for_status()
    with context.database.read() as session:
        session.scalars(select(NewestMeasurement)).all()
        session.expunge_all()
        first.put_shard(3, make_batch(seed=3)).raise_for_status()
        assert first.get("measurements", **asked).json()["columns"]["step"] == [0, 1, 2, 3]
        query = CurveQuery(comparisons=(TRAINER_ROLLOUT,), measures=("k3_kl",))
        read_curves(session, context, UNRESTRICTED, first.run, query)
    first.put_shard(4, make_batch(seed=4)).raise_for_status()
    assert first.get("measurements", **asked).json()["columns"]["step"] == [0, 1, 2, 3, 4]
