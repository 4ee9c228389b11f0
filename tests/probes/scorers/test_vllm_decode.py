"""`vllm.decode`: the log-probs of forced tokens are those of the model at any temperature."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from foreshock.rollouts import BatchAttributes, RolloutBatch
from tests.probes.replaying import Replayer
from tests.probes.tiny import make_rollouts

pytestmark = [pytest.mark.slow, pytest.mark.vllm, pytest.mark.timeout(900)]


def test_forced_tokens_have_the_models_log_probs_at_any_temperature(replay: Replayer, checkpoints: Path) -> None:
    processed = BatchAttributes(logprobs_mode="processed_logprobs")
    rollouts = make_rollouts(9, attributes=processed, temperature=[0.5] * 5 + [2.0] * 4)
    by_torch, _ = replay.score(rollouts, checkpoints / "first", "torch.float32")
    by_vllm, made_by = replay.score(rollouts, checkpoints / "first", "vllm.decode", dtype="float32")
    np.testing.assert_allclose(by_vllm, by_torch, atol=1e-4)
    assert made_by.dtype == "float32"
    # Few rows at a time: rollouts wait, enter and leave the engine's batch.
    rebatched, _ = replay.score(rollouts, checkpoints / "first", "vllm.decode", "rebatched", dtype="float32")
    np.testing.assert_allclose(rebatched, by_torch, atol=1e-4)


def test_empty_prompts_and_responses_are_scored(replay: Replayer, checkpoints: Path) -> None:
    rollouts = RolloutBatch.from_lists(["a", "b", "c", "d"], [[], [3], [4], []], [[5, 6], [], [7], [8]])
    by_vllm, _ = replay.score(rollouts, checkpoints / "first", "vllm.decode", dtype="float32")
    by_torch, _ = replay.score(rollouts, checkpoints / "first", "torch.float32")
    assert np.isnan(by_vllm).tolist() == [True, False, False, True]
    np.testing.assert_allclose(by_vllm, by_torch, atol=1e-4)
