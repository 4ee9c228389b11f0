"""A model divided among two real processes of vLLM has the same log-probs; a process that dies fails the command."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from foreshock.rollouts import BatchAttributes
from foreshock_probes.engines.process import EngineError, EnginePool
from foreshock_probes.scorers.rank_processes import device_count
from tests.probes.replaying import Replayer
from tests.probes.tiny import make_rollouts

pytestmark = [
    pytest.mark.slow,
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.skipif(device_count() < 2, reason="needs two devices"),
]

TWO: dict[str, Any] = {"dtype": "float32", "tensor_parallel_size": 2}


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EnginePool]:
    """Engines of this file alone: a test kills one."""
    pool = EnginePool(tmp_path_factory.mktemp("engines"))
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def divided(tmp_path_factory: pytest.TempPathFactory, pool: EnginePool) -> Replayer:
    """Scores through `pool`."""
    return Replayer(tmp_path_factory.mktemp("replay"), pool)


@pytest.mark.parametrize("scorer", ["vllm.prefill", "vllm.decode"])
def test_log_probs_are_those_of_the_whole_model_at_any_temperature(
    divided: Replayer, checkpoints: Path, scorer: str
) -> None:
    attributes = BatchAttributes(logprobs_mode="processed_logprobs")
    rollouts = make_rollouts(9, attributes=attributes, temperature=[0.5] * 3 + [1.0] * 3 + [2.0] * 3)
    by_torch, _ = divided.score(rollouts, checkpoints / "first", "torch.float32")
    by_vllm, made_by = divided.score(rollouts, checkpoints / "first", scorer, **TWO)
    np.testing.assert_allclose(by_vllm, by_torch, atol=1e-4)
    assert made_by.flags["tensor_parallel_size"] == "2"
    assert made_by.attention_backend


def test_a_killed_process_fails_the_command_and_leaves_nothing_behind(divided: Replayer, checkpoints: Path) -> None:
    rollouts = make_rollouts(3)
    divided.score(rollouts, checkpoints / "first", "vllm.prefill", **TWO)
    workers = _workers(divided.process_ids()["vllm"])
    assert len(workers) == 2
    os.kill(workers[1].pid, signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(EngineError) as error:
        divided.score(rollouts, checkpoints / "first", "vllm.prefill", **TWO)
    assert error.value.kind == "retry"
    assert time.monotonic() - start < 60
    assert "vllm" not in divided.process_ids()
    _, running = psutil.wait_procs(workers, timeout=60)
    assert not running


def _workers(engine: int) -> list[psutil.Process]:
    """Return the processes of the engine that hold a part of the model."""
    return [each for each in psutil.Process(engine).children() if each.name().startswith("VLLM::Worker")]
