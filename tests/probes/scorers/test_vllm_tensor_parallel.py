"""A model divided among two real processes of vLLM has the same log-probs; a process that dies fails the job."""

from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from foreshock.rollouts import BatchAttributes
from foreshock_probes.engines.process import EngineError, run_tasks
from foreshock_probes.scorers.devices import device_count
from tests.probes.replaying import Asked, scored
from tests.probes.scorers.test_torch_forward import score
from tests.probes.tiny import make_rollouts

pytestmark = [
    pytest.mark.slow,
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.skipif(device_count() < 2, reason="needs two devices"),
]

TWO: dict[str, Any] = {"dtype": "float32", "tensor_parallel_size": 2}


def test_log_probs_are_those_of_the_whole_model_at_any_temperature(checkpoints: Path, tmp_path: Path) -> None:
    attributes = BatchAttributes(logprobs_mode="processed_logprobs")
    rollouts = make_rollouts(9, attributes=attributes, temperature=[0.5] * 3 + [1.0] * 3 + [2.0] * 3)
    by_torch = score(checkpoints / "first", rollouts, "torch.float32").log_probs
    scorers = ("vllm.prefill", "vllm.decode")
    asked = [Asked(rollouts, checkpoints / "first", scorer, options=TWO) for scorer in scorers]
    for by_vllm, made_by in scored(tmp_path, *asked):
        np.testing.assert_allclose(by_vllm, by_torch, atol=1e-4)
        assert made_by.flags["tensor_parallel_size"] == "2"
        assert made_by.attention_backend


def test_a_killed_process_fails_the_job_and_leaves_nothing_behind(checkpoints: Path, tmp_path: Path) -> None:
    asked = Asked(make_rollouts(6000), checkpoints / "first", "vllm.decode", options={**TWO, "batch_size": 8})
    workers: list[psutil.Process] = []

    def kill(tokens: int) -> None:
        if tokens and not workers:
            workers.extend(_workers())
            workers[-1].kill()

    with pytest.raises(EngineError) as error:
        run_tasks([asked.task(tmp_path, "killed")], lambda task: None, tmp_path, report=kill)
    assert error.value.kind == "retry"
    assert len(workers) == 2
    _, running = psutil.wait_procs(workers, timeout=60)
    assert not running


def _workers() -> list[psutil.Process]:
    """Return the processes of an engine that hold a part of the model."""
    return [each for each in psutil.Process().children(recursive=True) if each.name().startswith("VLLM::Worker")]
