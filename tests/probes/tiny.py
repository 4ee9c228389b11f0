"""A tiny checkpoint and rollouts for the probes' tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from foreshock.rollouts import BatchAttributes, RolloutBatch

VOCABULARY = 24


def save_checkpoint(folder: Path, seed: int, **configuration: object) -> Path:
    """Save a randomly initialised Qwen3 of 30 thousand parameters with an untied head, as safetensors."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    values: dict[str, object] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "max_position_embeddings": 128,
        "tie_word_embeddings": False,
        # Large weights, so that the log-probs of this untrained model are far from uniform.
        "initializer_range": 0.3,
    }
    Qwen3ForCausalLM(Qwen3Config(**(values | configuration))).save_pretrained(folder)
    return folder


def save_mixture_of_experts(folder: Path, seed: int, layers: int = 1) -> Path:
    """Save a randomly initialised Qwen3-MoE with two of four experts per token and layer, and an untied head."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(seed)
    configuration = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_experts=4,
        num_experts_per_tok=2,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        initializer_range=0.3,
    )
    Qwen3MoeForCausalLM(configuration).save_pretrained(folder)
    return folder


def make_rollouts(
    count: int = 10, seed: int = 0, attributes: BatchAttributes | None = None, **columns: Any
) -> RolloutBatch:
    """Return `count` rollouts with prompts of 1 to 6 tokens and responses of 0 to 20."""
    random = np.random.default_rng(seed)
    prompts = [random.integers(0, VOCABULARY, random.integers(1, 7)).tolist() for _ in range(count)]
    responses = [random.integers(0, VOCABULARY, random.integers(0, 21)).tolist() for _ in range(count)]
    names = [f"sample-{seed}-{number}" for number in range(count)]
    return RolloutBatch.from_lists(names, prompts, responses, attributes=attributes, **columns)
