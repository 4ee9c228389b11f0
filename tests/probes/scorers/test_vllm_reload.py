"""Weights that are loaded into a running vLLM engine: verified, or given up for another engine."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.probes.replaying import Replayer
from tests.probes.tiny import make_rollouts, save_checkpoint, save_mixture_of_experts

pytestmark = [pytest.mark.slow, pytest.mark.vllm, pytest.mark.timeout(900)]


def test_reloaded_engine_scores_as_one_started_with_the_weights(replay: Replayer, checkpoints: Path) -> None:
    rollouts = make_rollouts(9)
    first, made_by = replay.score(rollouts, checkpoints / "first", "vllm.prefill")
    process = replay.process_ids()["vllm"]
    second, remade_by = replay.score(rollouts, checkpoints / "second", "vllm.prefill")
    again, _ = replay.score(rollouts, checkpoints / "first", "vllm.prefill")
    assert replay.process_ids()["vllm"] == process
    started, started_by = replay.score(rollouts, checkpoints / "second", "vllm.prefill", fresh=True)
    assert replay.process_ids()["vllm"] != process
    assert second.tobytes() == started.tobytes()
    assert first.tobytes() == again.tobytes()
    assert np.abs(second - first).max() > 0.1
    assert remade_by == started_by
    assert made_by.weights_digest != remade_by.weights_digest


def test_tied_head_follows_the_embeddings(tmp_path: Path, replay: Replayer) -> None:
    rollouts = make_rollouts(9)
    first, second = (save_checkpoint(tmp_path / str(seed), seed, tie_word_embeddings=True) for seed in (1, 2))
    replay.score(rollouts, first, "vllm.prefill")
    process = replay.process_ids()["vllm"]
    reloaded, _ = replay.score(rollouts, second, "vllm.prefill")
    assert replay.process_ids()["vllm"] == process
    started, _ = replay.score(rollouts, second, "vllm.prefill", fresh=True)
    assert reloaded.tobytes() == started.tobytes()


def test_weights_that_cannot_be_verified_are_loaded_by_another_process(
    tmp_path: Path, replay: Replayer, engine_log: list[str]
) -> None:
    rollouts = make_rollouts(3)
    before, processes = len(engine_log), []
    for seed in (1, 2):
        replay.score(rollouts, save_mixture_of_experts(tmp_path / str(seed), seed), "vllm.prefill")
        processes.append(replay.process_ids()["vllm"])
    assert len(set(processes)) == 2
    (line,) = engine_log[before:]
    assert "experts" in line
