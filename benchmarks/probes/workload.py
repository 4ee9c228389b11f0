"""Models and rollouts of the benchmark: random weights, and lengths as uneven as those of real responses."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from foreshock.rollouts import RolloutBatch

__all__ = ["LONGEST", "make_rollouts", "save_model"]

LONGEST = 1024


def save_model(folder: Path, vocabulary: int, hidden: int, layers: int) -> Path:
    """Save a randomly initialised Qwen3 in bfloat16, its head untied."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    configuration = Qwen3Config(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=layers,
        num_attention_heads=hidden // 64, num_key_value_heads=max(1, hidden // 128), head_dim=64,
        max_position_embeddings=2 * LONGEST, tie_word_embeddings=False,
    )  # fmt: skip
    Qwen3ForCausalLM(configuration).to(torch.bfloat16).save_pretrained(folder)
    return folder


def make_rollouts(vocabulary: int, tokens: int) -> RolloutBatch:
    """Return rollouts of about `tokens` tokens: prompts of 16 to 64, log-normal responses with a median of 180."""
    random = np.random.default_rng(0)
    prompts: list[list[int]] = []
    responses: list[list[int]] = []
    left = tokens
    while left > 0:
        prompt = int(random.integers(16, 65))
        response = int(np.clip(random.lognormal(5.2, 0.7), 8, LONGEST - prompt))
        prompts.append(random.integers(0, vocabulary, prompt).tolist())
        responses.append(random.integers(0, vocabulary, response).tolist())
        left -= prompt + response
    return RolloutBatch.from_lists([f"sample-{row}" for row in range(len(prompts))], prompts, responses)
