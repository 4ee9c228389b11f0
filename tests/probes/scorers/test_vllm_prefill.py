"""vLLM's scorer in its own process: the distribution it follows, its memory bound, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from foreshock.rollouts import BatchAttributes, RolloutBatch
from foreshock_probes.engines.process import EngineError
from tests.probes.replaying import Replayer
from tests.probes.tiny import VOCABULARY, make_rollouts

pytestmark = [pytest.mark.slow, pytest.mark.vllm, pytest.mark.timeout(900)]

FLOAT32: dict[str, Any] = {"dtype": "float32"}


def test_log_probs_are_those_of_the_model_at_any_temperature(replay: Replayer, checkpoints: Path) -> None:
    weights = checkpoints / "first"
    for temperature in ([1.0] * 9, [0.5] * 5 + [2.0] * 4):
        attributes = BatchAttributes(logprobs_mode="processed_logprobs")
        rollouts = make_rollouts(9, attributes=attributes, temperature=temperature)
        by_torch, _ = replay.score(rollouts, weights, "torch.float32")
        by_vllm, _ = replay.score(rollouts, weights, "vllm.prefill", **FLOAT32)
        np.testing.assert_allclose(by_vllm, by_torch, atol=1e-4)


def test_empty_prompts_and_responses_are_scored(replay: Replayer, checkpoints: Path) -> None:
    rollouts = RolloutBatch.from_lists(["a", "b", "c", "d"], [[], [3], [4], []], [[5, 6], [], [7], [8]])
    by_vllm, _ = replay.score(rollouts, checkpoints / "first", "vllm.prefill", **FLOAT32)
    by_torch, _ = replay.score(rollouts, checkpoints / "first", "torch.float32")
    assert np.isnan(by_vllm).tolist() == [True, False, False, True]
    np.testing.assert_allclose(by_vllm, by_torch, atol=1e-4)


def test_batching_and_chunked_prefill_do_not_change_log_probs(replay: Replayer, checkpoints: Path) -> None:
    rollouts = make_rollouts(9)
    weights = checkpoints / "first"
    plain, made_by = replay.score(rollouts, weights, "vllm.prefill", **FLOAT32)
    rebatched, remade_by = replay.score(rollouts, weights, "vllm.prefill", "rebatched", **FLOAT32)
    np.testing.assert_allclose(rebatched, plain, atol=1e-4)
    assert made_by.batch_composition != remade_by.batch_composition
    bounded, bounded_by = replay.score(rollouts, weights, "vllm.prefill", logits_bytes=10 * VOCABULARY * 20, **FLOAT32)
    np.testing.assert_allclose(bounded, plain, atol=1e-4)
    assert bounded_by.flags["max_num_batched_tokens"] == "20"


def test_unsupported_request_raises_with_the_reason(replay: Replayer, checkpoints: Path) -> None:
    cut = make_rollouts(3, attributes=BatchAttributes(logprobs_mode="processed_logprobs", top_p=0.9))
    with pytest.raises(EngineError, match="top_p") as caught:
        replay.score(cut, checkpoints / "second", "vllm.prefill")
    assert caught.value.kind == "final"
    too_long = RolloutBatch.from_lists(["a"], [[1] * 100], [[2] * 40])
    with pytest.raises(EngineError, match=r"max_model_len|max_position_embeddings|model length"):
        replay.score(too_long, checkpoints / "second", "vllm.prefill")
