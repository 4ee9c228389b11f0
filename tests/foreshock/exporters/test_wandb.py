"""W&B itself, offline: the file of the run is read back."""

import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from foreshock import Client
from foreshock.exporters import WandbExporter
from tests.foreshock.exporters.trained import LATE_STEP, STEPS, curve, train
from tests.foreshock.exporters.wandb_file import history, metrics

wandb = pytest.importorskip("wandb")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning")]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("WANDB_SILENT", "true")
    started = wandb.init(project="foreshock-tests", mode="offline", dir=str(tmp_path))
    yield started
    started.finish()


@pytest.mark.parametrize("explicit_steps", [True, False])
def test_steps_join_the_trainers_run_and_cost_it_no_row(
    make: Callable[..., Client], run: Any, tmp_path: Path, explicit_steps: bool
) -> None:
    client = make(f"wandb-{explicit_steps}", export="wandb")
    rows = itertools.count()

    def log_reward(step: int) -> None:
        for _ in range(3):
            row = next(rows)
            reward = {"reward": step / 10, "row": row}
            run.log(reward, step=row) if explicit_steps else run.log(reward)
            time.sleep(0.7)

    train(client, log_reward)
    assert client.close()
    run.finish()
    written = history(tmp_path / "wandb")
    rewards = [row["row"] for row in written if "row" in row]
    assert rewards == list(range(next(rows))), "a row of the trainer is missing"
    exported = {row["foreshock/step"]: row["foreshock/k3_kl"] for row in written if "foreshock/step" in row}
    assert exported == pytest.approx(curve(client, "k3_kl"))
    steps = [row["foreshock/step"] for row in written if "foreshock/step" in row]
    assert sorted(steps) == list(STEPS), "each step once"
    assert steps.index(LATE_STEP) > steps.index(3), "the late step is a later row"
    assert any("foreshock/step" in row and "row" in row for row in written), "a step beside the trainer's reward"
    assert metrics(tmp_path / "wandb")["foreshock/*"] == "foreshock/step"


def test_all_steps_are_written_when_the_client_closes_before_the_trainers_next_row(
    make: Callable[..., Client], run: Any, tmp_path: Path
) -> None:
    client = make("wandb-at-end", export=WandbExporter(run, measures=("kl",)))
    run.log({"reward": 1.0}, step=100)
    train(client, lambda step: None)
    assert client.close()
    run.finish()
    written = history(tmp_path / "wandb")
    assert sorted(row["foreshock/step"] for row in written if "foreshock/step" in row) == list(STEPS)
    assert [row["reward"] for row in written if "reward" in row] == [1.0]
    assert all("foreshock/k3_kl" not in row for row in written)


def test_without_an_active_run_nothing_is_written_and_the_reason_is_logged(
    make: Callable[..., Client], caplog: pytest.LogCaptureFixture
) -> None:
    assert wandb.run is None
    client = make("wandb-none", export="wandb")
    client.start_run()
    train(client, lambda step: None)
    client.close(2)
    assert "6 steps were not exported: there is no active W&B run" in caplog.text
