"""The benchmark's models: eight architectures of 0.3 to 10 M parameters, randomly initialised or briefly trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

_SHAPE: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "initializer_range": 0.08,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_EXPERTS: dict[str, Any] = {
    "moe_intermediate_size": 128, "num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True
}  # fmt: skip
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("Qwen3", {}),
    "tied": ("Qwen3", {"tie_word_embeddings": True}),
    "qwen2": ("Qwen2", {}),
    "llama": ("Llama", {}),
    "moe": ("Qwen3Moe", _EXPERTS),
    "olmo": ("Olmo2", {}),
    "gemma": ("Gemma2", {"tie_word_embeddings": True, "query_pre_attn_scalar": 32, "sliding_window": 256}),
    "mixtral": ("Mixtral", {"num_local_experts": 8, "num_experts_per_tok": 2}),
    "ten_million": (
        "Qwen3",
        {"hidden_size": 320, "intermediate_size": 960, "num_hidden_layers": 6, "vocab_size": 2048},
    ),
}


_STEPS, _BATCH, _LENGTH, _FOLLOWERS = 150, 16, 64, 8


def model_of(name: str, folder: Path, seed: int) -> Path:
    """Return the folder of a model below `folder`, made there unless it is there.

    `name`: a kind, with "-trained" if it is, or with "-lora" for an adapter of it.
    """
    made = folder / name
    if not made.exists():
        temporary = folder / f"{name}.part"
        kind, _, how = name.partition("-")
        if how == "lora":
            _save_adapter(model_of(kind, folder, seed), temporary, seed)
        else:
            save_model(kind, temporary, seed, trained=how == "trained")
        temporary.rename(made)
    return made


def _save_adapter(base: Path, folder: Path, seed: int) -> None:
    """Save a LoRA adapter of a model, of the size of a few steps of training."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    adapted = get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj", "down_proj"]))
    with torch.no_grad():
        for name, value in adapted.named_parameters():
            if "lora_B" in name:
                value.normal_(std=0.01)
    adapted.save_pretrained(str(folder))


def save_model(kind: str, folder: Path, seed: int = 0, *, trained: bool = False) -> Path:
    """Save a model of a kind in bfloat16, and return its folder. Biases are random too, not 0."""
    import torch
    import transformers

    name, more = KINDS[kind]
    torch.manual_seed(seed)
    configuration = getattr(transformers, f"{name}Config")(**(_SHAPE | more))
    model = getattr(transformers, f"{name}ForCausalLM")(configuration)
    with torch.no_grad():
        for parameter_name, value in model.named_parameters():
            if parameter_name.endswith("bias"):
                value.normal_(std=0.1)
            elif "norm" in parameter_name:
                value.add_(0.1 * torch.randn_like(value))
    if trained:
        _train(model)
    model.to(torch.bfloat16).save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    return folder


def _train(model: Any) -> None:
    """Train on sequences in which each token has a few followers of unequal probability, for about ten seconds."""
    import torch

    # Threads that wait for each other cost more than they save at this size.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    vocabulary = model.config.vocab_size
    followers = torch.randint(vocabulary, (vocabulary, _FOLLOWERS))
    chances = torch.softmax(torch.randn(vocabulary, _FOLLOWERS), -1)
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    for _ in range(_STEPS):
        tokens = torch.randint(vocabulary, (_BATCH, 1))
        for _ in range(_LENGTH - 1):
            last = tokens[:, -1]
            chosen = torch.multinomial(chances[last], 1)
            tokens = torch.cat([tokens, followers[last].gather(1, chosen)], 1)
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.set_num_threads(threads)
