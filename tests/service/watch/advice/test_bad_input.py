"""A trainer with the shipped client and feed, and a real service, whose input is bad: it goes on with the last
decisions, never jumps up, and what it refuses is told with its reason."""

import math
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from fastapi import FastAPI

from foreshock import Client
from foreshock.client.reporting import LogOnce
from foreshock.integrations.trainer_run import TrainerRun
from foreshock.learning_rate import AdviceFeed
from foreshock.learning_rate.control_loop import LARGEST_RISE
from foreshock.learning_rate.decisions import STEPS_OF_A_RISE
from foreshock.learning_rate.length_decay import HORIZON
from foreshock.learning_rate.levers import Rollback
from foreshock.rollouts import BatchAttributes, RolloutBatch
from foreshock_service.app import create_app
from tests.service.sending import log_probs_of, make_batch
from tests.service.server import NO_CERTIFICATES, RunningServer
from tests.waiting import wait_until

RATE = 1e-6
STEPS = 12
Values = dict[str, float]
Log = Callable[[int], Values]


def lagging(step: int, rollouts: int = 160, **columns: Any) -> RolloutBatch:
    """Return rollouts with the weights of up to eight steps ago, and a large mismatch; `columns` override."""
    batch, random = make_batch(rollouts, seed=step), np.random.default_rng(step)
    moved = (0.02 if step == 1 else 0.4) * random.choice([-1.0, 1.0], batch.num_tokens)
    known: dict[str, Any] = {
        "trainer_log_probs": np.minimum(log_probs_of(batch)[0] + moved, 0.0).astype(np.float32),
        "weights_version": np.full(batch.num_tokens, max(step - 8, 1), np.int32),
        "attributes": BatchAttributes(trainer_weights_version=step),
    }
    return make_batch(rollouts, seed=step, **(known | columns))


class Trainer:
    """A training loop that follows all levers."""

    def __init__(self, url: str, spool: Path, first: int = 1) -> None:
        self.url = url
        self.client = Client(url, run_key="a-run", spool_directory=spool)
        self.feed = AdviceFeed(self.client)
        modes: Any = dict.fromkeys(("advice_mode", "correction_mode", "rollback_mode"), "apply")
        self.client.start_run(resume_step=first, initial_learning_rate=RATE, **modes)
        self.refusal: str | None = None
        self._run = TrainerRun("a loop", LogOnce("test"), lambda _: self.refusal)
        self._run.feed = self.feed
        self.scales: list[float] = []

    def train(self, steps: range, log: Log, *, awaited: bool = True, batch_of: Any = lagging) -> None:
        for step in steps:
            self.scales.append(self.feed.scale(step))
            self._run.correct(self.feed.correction(step), step)
            self.feed.rollback(step)
            values = {"learning_rate": RATE * self.scales[-1], "update_k3": 1e-2, **log(step)}
            self.feed.acknowledge(step, values["learning_rate"], self.scales[-1])
            self.client.log_rollouts(step, batch_of(step))
            self.client.log_scalars(step, values)
            if awaited:
                self.catch_up(step)

    def catch_up(self, step: int) -> None:
        """Wait until the service has judged a step, and the feed knows its decisions."""
        assert self.client.flush(60).undelivered == 0
        wait_until(lambda: self.served()["rate"]["observed_step"] == step)
        wait_until(lambda: self.feed.revision == self.served()["revision"])

    def served(self) -> dict[str, Any]:
        answer = httpx.get(f"{self.url}/v1/runs/{self.client.run_id}/advice", verify=NO_CERTIFICATES)
        found: dict[str, Any] = answer.raise_for_status().json()
        return found

    def close(self) -> None:
        self.feed.close()
        self.client.close()


@pytest.fixture
def trainer(server: RunningServer, tmp_path: Path) -> Iterator[Trainer]:
    started = Trainer(server.url, tmp_path)
    yield started
    started.close()


def assert_no_jump(scales: list[float]) -> None:
    """Assert that the scale rises slowly at most, but for the warm-up of the first three steps."""
    assert all(0.1 <= scale <= 1.0 for scale in scales)
    for before, after in pairwise(scales[2:]):
        assert after <= before * math.exp(STEPS_OF_A_RISE * LARGEST_RISE) + 1e-9


@pytest.mark.parametrize(
    ("batch_of", "log"),
    [
        pytest.param(partial(lagging, reward=None), lambda _: {}, id="no reward"),
        pytest.param(partial(lagging, weights_version=None), lambda _: {}, id="no versions"),
        pytest.param(lagging, lambda _: {"learning_rate": math.nan}, id="NaN rates"),
        pytest.param(
            lagging,
            lambda step: {"planned_last_step": (200.0, 13.0, math.nan, 2.0, -1.0, 1e9)[step % 6]},
            id="plan that changes",
        ),
    ],
)
def test_scale_falls_by_what_is_left_and_never_jumps(trainer: Trainer, batch_of: Any, log: Log) -> None:
    trainer.train(range(1, STEPS), log, batch_of=batch_of)
    assert_no_jump(trainer.scales)
    found = trainer.served()
    assert found["rate"]["advised_scale"] < 0.9
    assert found["correction"]["applied"]["done"] == {"kind": "token_tis", "threshold": "2"}
    assert (found["rollback"]["advised"], found["rollback"]["applied"]) == (None, None)
    # What is not a number is not acknowledged, and the feed goes on.
    is_told = not math.isnan(log(1).get("learning_rate", RATE))
    assert (found["rate"]["applied"] is not None) is is_told


def test_correction_that_the_trainer_refuses_is_told_and_the_rate_goes_on(trainer: Trainer) -> None:
    trainer.refusal = "set tis=True and restart"
    trainer.train(range(1, STEPS), lambda _: {})
    wait_until(lambda: trainer.served()["correction"]["applied"] is not None)
    applied = trainer.served()["correction"]["applied"]
    assert (applied["done"], applied["refused"]) == (None, "set tis=True and restart")
    assert trainer.scales[-1] < 0.9
    assert_no_jump(trainer.scales)


def test_rollback_to_a_lost_checkpoint_is_told_once_and_training_goes_on(trainer: Trainer, tmp_path: Path) -> None:
    called: list[int] = []

    def go_back(found: Rollback) -> None:
        called.append(found.step)
        raise FileNotFoundError(found.path)

    trainer.feed.on_rollback(go_back)
    folder = tmp_path / "checkpoint-10"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")
    trainer.client.log_checkpoint(11, root="runs", path=folder.name, local_folder=folder)

    def rewards(step: int) -> Any:
        reward = np.full(160, 0.6 + 0.01 * (step % 3) if step < 31 else 0.0, np.float32)
        return lagging(step, reward=reward)

    trainer.train(range(1, 50), lambda _: {}, awaited=False, batch_of=rewards)
    trainer.catch_up(49)
    assert trainer.served()["rollback"]["advised"]["step"] == 11
    trainer.train(range(50, 54), lambda _: {}, batch_of=rewards)
    assert called == [11]
    applied = trainer.served()["rollback"]["applied"]
    assert (applied["done"], applied["refused"]) == (None, "FileNotFoundError: checkpoint-10")
    assert_no_jump(trainer.scales[49:])


def test_of_two_trainers_of_a_run_the_newer_is_advised_and_the_older_stays(trainer: Trainer, tmp_path: Path) -> None:
    trainer.train(range(1, STEPS), lambda _: {})
    before = trainer.feed.revision
    newer = Trainer(trainer.url, tmp_path / "newer", first=STEPS)
    wait_until(lambda: newer.feed.advice is not None and newer.feed.advice.attempt == 2)
    for step in range(STEPS, STEPS + 5):
        trainer.train(range(step, step + 1), lambda _: {}, awaited=False)
        newer.train(range(step, step + 1), lambda _: {})
    newer.close()
    assert (trainer.feed.revision, newer.feed.revision > before) == (before, True)
    assert trainer.scales[STEPS:] == sorted(trainer.scales[STEPS:], reverse=True)
    assert_no_jump([*trainer.scales[: STEPS - 1], *newer.scales])


def test_trainer_goes_on_while_the_service_is_away_for_100_steps(app: FastAPI, settings: Any, tmp_path: Path) -> None:
    with RunningServer(app) as server:
        trainer = Trainer(server.url, tmp_path)
        trainer.train(range(1, STEPS), lambda _: {})
        revision = trainer.feed.revision
    correction = trainer.feed.correction(STEPS)
    trainer.train(range(STEPS, STEPS + 100), lambda _: {}, awaited=False, batch_of=partial(lagging, rollouts=40))
    away = trainer.scales[STEPS - 1 :]
    assert correction is not None
    assert (trainer.feed.revision, trainer.feed.correction(STEPS + 99)) == (revision, correction)
    assert away == sorted(away, reverse=True)
    assert set(away[HORIZON:]) == {away[HORIZON]}
    with RunningServer(create_app(settings), server.port):
        trainer.catch_up(STEPS + 99)
        trainer.train(range(STEPS + 100, STEPS + 104), lambda _: {})
        assert trainer.served()["rate"]["applied"]["step"] == STEPS + 103
        trainer.close()
    assert_no_jump(trainer.scales)
