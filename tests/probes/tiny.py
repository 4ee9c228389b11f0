"""A tiny checkpoint and rollouts for the probes' tests."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foreshock.rollouts import BatchAttributes, RolloutBatch
from foreshock_probes.scorers.tokens import sequence

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
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, moe_intermediate_size=32, num_experts=4,
        num_experts_per_tok=2, num_hidden_layers=layers, num_attention_heads=2, num_key_value_heads=1, head_dim=32,
        max_position_embeddings=128, tie_word_embeddings=False, initializer_range=0.3,
    )  # fmt: skip
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


def each_sequence(rollouts: RolloutBatch) -> Iterator[tuple[Any, int, slice]]:
    """Yield, for each rollout, its tokens as a tensor [1, time], the size of its prompt and its place in [T]."""
    import torch

    for row in range(rollouts.num_rollouts):
        ids = torch.from_numpy(sequence(rollouts, row).astype(np.int64))[None]
        start, stop = rollouts.response_offsets[row : row + 2].tolist()
        yield ids, ids.shape[1] - (stop - start), slice(start, stop)


def plain_logits(model: Any, rollouts: RolloutBatch, autocast: Any = None) -> Any:
    """Return float64 logits [T, V] of a pass over each rollout alone, without padding or mask; NaN without a state."""
    import torch

    found = torch.full((rollouts.num_tokens, model.config.vocab_size), torch.nan, dtype=torch.float64)
    for ids, prompt, place in each_sequence(rollouts):
        first = max(1 - prompt, 0)
        if place.start + first >= place.stop:
            continue
        with torch.no_grad(), torch.autocast("cpu", dtype=autocast or torch.bfloat16, enabled=autocast is not None):
            logits = model(ids, use_cache=False).logits[0].double()
        found[place.start + first : place.stop] = logits[max(prompt - 1, 0) : -1]
    return found


def one_by_one(folder: Path, rollouts: RolloutBatch, temperature: float = 1.0) -> NDArray[np.float32]:
    """Return the log-probs [T] of each rollout alone, in float32."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    log_probs = torch.log_softmax(plain_logits(model, rollouts) / temperature, dim=-1).numpy()
    of_tokens = log_probs[np.arange(rollouts.num_tokens), rollouts.response_token_ids]
    found: NDArray[np.float32] = of_tokens.astype(np.float32)
    return found
