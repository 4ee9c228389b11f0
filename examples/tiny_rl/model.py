"""The policy: a Qwen3-architecture model of a third of a million parameters, and its checkpoints.

The embeddings are **not** tied to the output head: vLLM's `reload_weights` on CPU can leave a tied head stale, which
looks exactly like a training-inference mismatch that grows with the learning rate.
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from examples.tiny_rl.task import END_OF_SEQUENCE, PAD, VOCABULARY_SIZE

MAX_POSITIONS = 128


def new_model(seed: int) -> Qwen3ForCausalLM:
    """Return a randomly initialised float32 model; the same seed gives the same weights."""
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCABULARY_SIZE,
            hidden_size=96,
            intermediate_size=256,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=MAX_POSITIONS,
            tie_word_embeddings=False,
            pad_token_id=PAD,
            bos_token_id=None,
            eos_token_id=END_OF_SEQUENCE,
        )
    )


def load_model(folder: Path) -> Qwen3ForCausalLM:
    """Load the float32 master weights of a checkpoint."""
    return Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32)


def save_model(model: Qwen3ForCausalLM, folder: Path) -> None:
    """Write `config.json` and `model.safetensors` (float32), which transformers and vLLM both load."""
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    # vLLM would read sampling defaults from a generation_config.json beside the weights; the sampler sets its own.
    (folder / "generation_config.json").unlink(missing_ok=True)


def parameter_count(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
