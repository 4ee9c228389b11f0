"""Closing a step: one short transaction with a fold prepared outside it, under concurrent changes."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Thread
from typing import Any, NoReturn

import httpx
import pytest
from fastapi import FastAPI
from sqlalchemy import func, select, update
from sqlalchemy.orm import Session

from foreshock.clock import now_us
from foreshock.errors import StatisticsError
from foreshock.rollouts import DecodeLimits, RolloutBatch, encode_rollouts
from foreshock_service.platform.database.session import Database
from foreshock_service.platform.database.tables import DetectorSnapshot, Shard, Step
from foreshock_service.runs import shard_decoding, shards
from foreshock_service.runs.due import WAKE
from foreshock_service.runs.events import StepKey
from foreshock_service.watch.advance import mark_waiting_runs
from tests.service.advancing import close_overdue, is_due, paused
from tests.service.sending import Sender, make_batch
from tests.waiting import wait_until

Folding = Callable[[Callable[[], object]], list[StepKey]]
TOKENS = {"comparison": "trainer/rollout", "measure": "tokens"}


def tokens_of(sender: Sender) -> Any:
    return sender.get("measurements", **TOKENS).json()["columns"]["tokens"]


def count_of(app: FastAPI, table: type[Any]) -> int:
    with app.state.context.database.read() as session:
        return session.scalar(select(func.count()).select_from(table)) or 0


@pytest.fixture
def writes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the transactions that the service runs, one entry each."""
    seen: list[str] = []
    write = Database.write

    def counted(self: Database, work: Callable[[Session], Any]) -> Any:
        seen.append("write")
        return write(self, work)

    monkeypatch.setattr(Database, "write", counted)
    return seen


@pytest.fixture
def during_the_fold(monkeypatch: pytest.MonkeyPatch) -> Folding:
    """Run an action once, after the next fold is prepared and before it is stored; the folds are listed."""

    def install(action: Callable[[], object]) -> list[StepKey]:
        prepare, prepared = shards._fold, []

        def wrapped(session: Session, key: StepKey) -> Any:
            found = prepare(session, key)
            prepared.append(key)
            if len(prepared) == 1:
                action()
            return found

        monkeypatch.setattr(shards, "_fold", wrapped)
        return prepared

    return install


def test_step_of_one_shard_is_stored_and_closed_in_a_transaction(
    sender: Sender, app: FastAPI, writes: list[str]
) -> None:
    writes.clear()
    with paused(app.state.context.database):
        sender.put_shard(0, make_batch(seed=1)).raise_for_status()
    assert len(writes) == 1
    assert sender.get("steps/0/lint").json()["shards"] == 1
    assert len(writes) == 1


def test_fold_and_what_follows_are_a_transaction_each(sender: Sender, app: FastAPI, writes: list[str]) -> None:
    with paused(app.state.context.database):
        for shard in range(3):
            sender.put_shard(0, make_batch(seed=shard), shard, 3).raise_for_status()
        writes.clear()
        # The fold, and what follows from it.
        app.state.advancing.advance_due_runs()
    assert len(writes) == 2


def test_scalars_cost_a_transaction_before_and_after_closing(sender: Sender, app: FastAPI, writes: list[str]) -> None:
    app.state.context.database.session_info.pop(WAKE)
    writes.clear()
    assert sender.put_scalars(0, {"grad_norm": 1.0}).status_code == 204
    assert len(writes) == 1
    sender.put_shard(0, make_batch()).raise_for_status()
    assert sender.put_scalars(0, {"grad_norm": 2.0}).status_code == 204
    assert len(writes) == 3


def test_shard_that_arrives_meanwhile_repeats_the_fold(sender: Sender, app: FastAPI, during_the_fold: Folding) -> None:
    parts = [make_batch(seed=seed) for seed in range(4)]
    sender.put_shard(0, parts[0], 0, 4).raise_for_status()
    assert close_overdue(app.state.context) == 1
    answers: list[httpx.Response] = []
    late = Thread(target=lambda: answers.append(sender.put_shard(0, parts[2], 2, 4)))

    def arrive() -> None:
        late.start()
        wait_until(lambda: count_of(app, Shard) == 3)

    folds = during_the_fold(arrive)
    sender.put_shard(0, parts[1], 1, 4).raise_for_status()
    late.join()
    answers[0].raise_for_status()
    # When the late shard is handled, the step's fold already includes it.
    assert folds == [(sender.run, 1, 0)] * 2
    assert tokens_of(sender) == [sum(part.num_tokens for part in parts[:3])]
    assert sender.items("steps")[0]["shards"] == 3


def test_late_shards_at_once_are_all_folded(sender: Sender, app: FastAPI) -> None:
    parts = [make_batch(seed=seed) for seed in range(8)]
    sender.put_shard(0, parts[0], 0, 9).raise_for_status()
    assert close_overdue(app.state.context) == 1
    with ThreadPoolExecutor(7) as threads:
        list(threads.map(lambda shard: sender.put_shard(0, parts[shard], shard, 9), range(1, 8)))
    assert tokens_of(sender) == [sum(part.num_tokens for part in parts)]
    assert mark_waiting_runs(app.state.context) == 0


def test_run_deleted_during_the_fold_is_not_measured(
    sender: Sender, http: httpx.Client, app: FastAPI, during_the_fold: Folding
) -> None:
    sender.put_shard(0, make_batch(seed=0), 0, 2).raise_for_status()
    folds = during_the_fold(lambda: http.delete(f"/v1/runs/{sender.run}").raise_for_status())
    sender.put_shard(0, make_batch(seed=1), 1, 2).raise_for_status()
    assert len(folds) == 1
    with app.state.context.database.read() as session:
        assert session.scalar(select(Step.closed_at_us)) is None
    assert mark_waiting_runs(app.state.context) == 0


def test_step_superseded_during_the_fold_is_not_observed(
    sender: Sender, app: FastAPI, during_the_fold: Folding
) -> None:
    sender.put_shard(4, make_batch(seed=0), 0, 2).raise_for_status()

    def resume() -> None:
        with paused(app.state.context.database):
            sender.new_attempt("resumed", 3)

    during_the_fold(resume)
    sender.put_shard(4, make_batch(seed=1), 1, 2).raise_for_status()
    assert count_of(app, DetectorSnapshot) == 0
    assert sender.get("steps").json()["items"] == []
    assert sender.get("steps", attempt=1).json()["items"][0]["closed"] is True


def test_step_whose_fold_fails_is_closed_later(
    sender: Sender, app: FastAPI, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise OSError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(shards, "fold_step", fail)
        for step in (0, 1):
            sender.put_shard(step, make_batch(seed=0), 0, 2).raise_for_status()
            assert sender.put_shard(step, make_batch(seed=1), 1, 2).status_code == 201
        assert mark_waiting_runs(app.state.context) == 1
        assert len(tokens_of(sender)) == 0
    assert "could not close its step 1" in caplog.text
    (alert,) = sender.get("alerts").json()["items"]
    assert "The service could not close its step 0: OSError: no memory" in alert["why"]
    assert mark_waiting_runs(app.state.context) == 1
    assert len(tokens_of(sender)) == 2


def test_step_without_all_shards_closes_after_the_clock_was_set_back(app: FastAPI, sender: Sender) -> None:
    sender.put_shard(0, make_batch(), 0, 2).raise_for_status()
    context = app.state.context
    assert mark_waiting_runs(context) == 0
    later = now_us() + 2 * int(context.settings.step_grace_seconds * 1e6)
    context.database.write(lambda session: session.execute(update(Step).values(last_shard_at_us=later)))
    assert mark_waiting_runs(context) == 1
    assert sender.get("steps").json()["items"][0]["closed"]


def test_step_that_completes_meanwhile_is_closed_in_the_same_turn(
    sender: Sender, app: FastAPI, during_the_fold: Folding
) -> None:
    """Its mark is read in the turn, so nothing else would make the run due before the next sweep."""
    later = Thread(target=lambda: sender.put_shard(1, make_batch(seed=1), 1, 2).raise_for_status())

    def arrive() -> None:
        later.start()
        wait_until(lambda: count_of(app, Shard) == 4)

    folds = during_the_fold(arrive)
    with paused(app.state.context.database):
        for step, shard in ((1, 0), (0, 0), (0, 1)):
            sender.put_shard(step, make_batch(seed=shard), shard, 2).raise_for_status()
        app.state.advancing.advance_due_runs()
        later.join()
    assert not is_due(app.state.advancing)
    assert folds == [(sender.run, 1, 0), (sender.run, 1, 1)]


def test_fault_of_the_services_own_statistics_is_not_the_uploads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(batch: RolloutBatch) -> NoReturn:
        raise StatisticsError("blobs of different settings")

    monkeypatch.setattr(shard_decoding, "measure_step", fail)
    (tmp_path / "body").write_bytes(encode_rollouts(make_batch(4)))
    # An InvalidRolloutsError would refuse the upload for good, and its client drop it.
    with pytest.raises(StatisticsError):
        shard_decoding.decode_shard(tmp_path / "body", tmp_path / "stored", DecodeLimits(), None)
