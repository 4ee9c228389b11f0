"""Tests of the order in which shards that are ingested together are committed."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import httpx
import pytest
from fastapi import FastAPI
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import event, select

from foreshock.rollouts import encode_rollouts
from foreshock_service.platform.database.session import Database
from foreshock_service.platform.database.tables import Shard
from foreshock_service.platform.settings import Settings
from foreshock_service.runs.ingest import order as order_module
from foreshock_service.runs.ingest import service as ingest
from foreshock_service.runs.ingest.order import IngestOrder, Place
from foreshock_service.runs.ingest.schemas import ShardAddress
from foreshock_service.runs.step_key import StepKey
from tests.service.sending import make_batch, start_run


def waits(order: IngestOrder, key: StepKey, passed: threading.Event) -> threading.Thread:
    entered = threading.Event()

    def run() -> None:
        with order.place(key) as place:
            entered.set()
            place.wait_for_earlier_steps()
            passed.set()

    thread = threading.Thread(target=run)
    thread.start()
    assert entered.wait(30)
    return thread


def test_a_later_step_waits_until_the_earlier_one_leaves() -> None:
    order, passed = IngestOrder(), threading.Event()
    with order.place(StepKey("run", 1, 4)) as earlier:
        thread = waits(order, StepKey("run", 1, 5), passed)
        assert not passed.wait(0.1)
        earlier.leave()
        assert passed.wait(30)
        thread.join()


@pytest.mark.parametrize(
    "other", [StepKey("run", 1, 3), StepKey("run", 1, 4), StepKey("run", 2, 5), StepKey("another", 1, 5)]
)
def test_earlier_steps_the_same_step_and_other_attempts_do_not_wait(other: StepKey) -> None:
    order, passed = IngestOrder(), threading.Event()
    with order.place(StepKey("run", 1, 4)):
        waits(order, other, passed).join(30)
        assert passed.is_set()


def test_a_later_step_does_not_wait_for_a_body_that_takes_long_to_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order_module, "_LONGEST_WAIT_SECONDS", 0.2)
    order, passed = IngestOrder(), threading.Event()
    with order.place(StepKey("run", 1, 4)):
        thread = waits(order, StepKey("run", 1, 5), passed)
        assert passed.wait(30)
        thread.join()


def test_an_upload_that_fails_lets_the_later_steps_go_on() -> None:
    order, passed = IngestOrder(), threading.Event()

    def fail() -> None:
        with order.place(StepKey("run", 1, 4)):
            waits(order, StepKey("run", 1, 5), passed)
            raise ValueError("damaged")

    with pytest.raises(ValueError, match="damaged"):
        fail()
    assert passed.wait(30)


@given(st.lists(st.tuples(st.integers(1, 2), st.integers(0, 5)), max_size=12))
def test_nothing_is_kept_when_every_shard_has_left(keys: Sequence[tuple[int, int]]) -> None:
    order = IngestOrder()
    with ExitStack() as places:
        entered = [places.enter_context(order.place(StepKey("run", attempt, step))) for attempt, step in keys]
        for place in entered[::2]:
            place.leave()
            place.leave()
    assert not order._attempts


def test_a_step_that_is_decoded_first_is_committed_after_the_earlier_one(
    http: httpx.Client, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender = start_run(http)
    second_waits, first_received = threading.Event(), threading.Event()
    wait, store = Place.wait_for_earlier_steps, ingest._store_shard

    def note_and_wait(place: Place) -> None:
        if place._step == 2:
            second_waits.set()
        wait(place)

    def store_late(*arguments: object) -> object:
        address = arguments[2]
        assert isinstance(address, ShardAddress)
        if address.step == 1:
            first_received.set()
            assert second_waits.wait(60)
        return store(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Place, "wait_for_earlier_steps", note_and_wait)
    monkeypatch.setattr(ingest, "_store_shard", store_late)
    with ThreadPoolExecutor(1) as threads:
        first = threads.submit(sender.put_shard, 1, encode_rollouts(make_batch(seed=1)))
        assert first_received.wait(60)
        sender.put_shard(2, encode_rollouts(make_batch(seed=2))).raise_for_status()
        first.result().raise_for_status()
    database = Database(settings.database_url)
    with database.read() as session:
        received = session.scalars(select(Shard.step).order_by(Shard.received_at_us)).all()
    database.close()
    assert received == [1, 2]


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_steps_that_are_ready_while_the_writer_is_busy_are_committed_together(http: httpx.Client, app: FastAPI) -> None:
    database = app.state.context.database
    sender = start_run(http)
    sender.put_shard(1, encode_rollouts(make_batch(seed=1))).raise_for_status()
    commits: list[object] = []
    event.listen(database._write_engine, "commit", commits.append)
    entered, leave = threading.Event(), threading.Event()

    def hold(_: object) -> None:
        entered.set()
        leave.wait(60)

    with ThreadPoolExecutor(4) as threads:
        held = threads.submit(database.write, hold)
        assert entered.wait(60)
        sent = [threads.submit(sender.put_shard, step, encode_rollouts(make_batch(seed=step))) for step in (2, 3, 4)]
        deadline = time.monotonic() + 60
        while database.writes_waiting < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert database.writes_waiting == 3
        leave.set()
        held.result()
        answers = [each.result() for each in sent]
    assert all(answer.json()["step_closed"] for answer in answers)
    # The unit that held the writer changes nothing, so it has no transaction.
    assert len(commits) == 1
    with database.read() as session:
        assert session.scalars(select(Shard.step).order_by(Shard.received_at_us)).all() == [1, 2, 3, 4]
