"""`megatron.local`: Megatron-core's own model gives the log-probs of transformers' one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from foreshock_probes.scorers.request import UnsupportedScoreError
from tests.probes.scorers.test_torch_forward import score
from tests.probes.tiny import VOCABULARY, make_rollouts, save_checkpoint, save_mixture_of_experts

NAME = "megatron.local"


@pytest.fixture(scope="module", autouse=True)
def _process_groups() -> Iterator[None]:
    """End Megatron's groups and torch's, which the scorer starts in its own process."""
    yield
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def save_family(folder: Path, family: str) -> Path:
    """Save a tiny model with a tied head and two groups of heads."""
    torch.manual_seed(1)
    configuration = AutoConfig.for_model(
        family, vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True, initializer_range=0.3,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(configuration).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama"])
def test_it_equals_torch_in_float32(tmp_path: Path, family: str) -> None:
    folder = save_checkpoint(tmp_path, seed=1) if family == "qwen3" else save_family(tmp_path, family)
    rollouts = make_rollouts(20)
    found = score(folder, rollouts, NAME, dtype="float32")
    np.testing.assert_allclose(found.log_probs, score(folder, rollouts).log_probs, atol=5e-5)
    assert "megatron-core" in found.fingerprint.flags["model"]


def test_in_bfloat16_it_is_as_near_as_torch_is(checkpoints: Path) -> None:
    rollouts = make_rollouts(30)
    exact = score(checkpoints / "first", rollouts).log_probs
    found, plain = (score(checkpoints / "first", rollouts, name) for name in (NAME, "torch.bfloat16"))
    errors = [float(np.abs(each.log_probs - exact).mean()) for each in (found, plain)]
    assert 0 < errors[0] < 3 * errors[1]
    assert found.fingerprint.dtype == "bfloat16"


def test_other_families_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedScoreError, match="loads llama, qwen2, qwen3, got model_type qwen3_moe"):
        score(save_mixture_of_experts(tmp_path, seed=1), make_rollouts(2), NAME)
