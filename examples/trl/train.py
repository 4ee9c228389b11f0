"""Train a tiny model with TRL's `GRPOTrainer` or `RLOOTrainer` and real vLLM, connected by `ForeshockCallback`.

    python -m examples.trl.train --steps 5

The lines that connect the trainer are marked. The task is to write the digit 1; the model has 100,000 parameters.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

# vLLM on a CPU: in this process, without fetching anything.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

TRAINERS = {"grpo": (GRPOTrainer, GRPOConfig), "rloo": (RLOOTrainer, RLOOConfig)}
SYMBOLS = ("<pad>", "<eos>", *"0123456789+= ")
PROMPTS = ("1+1=", "2+2=", "12+3=")


def save_model(folder: Path) -> None:
    """Write a model with random weights and a tokenizer of single characters."""
    torch.manual_seed(0)
    configuration = Qwen3Config(
        vocab_size=len(SYMBOLS), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=256, tie_word_embeddings=False, pad_token_id=0,
        bos_token_id=None, eos_token_id=1,
    )  # fmt: skip
    Qwen3ForCausalLM(configuration).save_pretrained(folder)
    characters = Tokenizer(
        models.WordLevel({symbol: number for number, symbol in enumerate(SYMBOLS)}, unk_token="<pad>")
    )
    characters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=characters, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )
    tokenizer.save_pretrained(folder)


def reward_of_ones(completions: list[str], **_: Any) -> list[float]:
    """Return the number of ones in each completion, over ten."""
    return [completion.count("1") / 10 for completion in completions]


def new_trainer(
    folder: Path,
    *,
    algorithm: str = "grpo",
    steps: int = 5,
    use_vllm: bool = True,
    reward: Callable[..., list[float]] = reward_of_ones,
    **arguments: Any,
) -> Any:
    """Return a trainer of the model in `folder / "model"`. `arguments` are further ones of its configuration."""
    model = folder / "model"
    if not model.exists():
        save_model(model)
    trainer_class, configuration_class = TRAINERS[algorithm]
    engine = {"use_vllm": True, "vllm_mode": "colocate", "vllm_max_model_length": 128} if use_vllm else {}
    settings = {
        "use_cpu": True, "bf16": False, "report_to": [], "max_steps": steps, "logging_steps": 1, "save_strategy": "no",
        "learning_rate": 1e-3, "per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 24,
        "temperature": 0.9, **engine, **arguments,
    }  # fmt: skip
    configuration = configuration_class(output_dir=str(folder / "checkpoints"), **settings)
    trainer = trainer_class(
        model=str(model),
        reward_funcs=reward,
        args=configuration,
        train_dataset=Dataset.from_dict({"prompt": [*PROMPTS] * 8}),
        processing_class=PreTrainedTokenizerFast.from_pretrained(model),
    )
    if use_vllm:
        _reload_weights_on_cpu(trainer, folder / "synchronised")
    return trainer


def _reload_weights_on_cpu(trainer: Any, folder: Path) -> None:
    """Send new weights to vLLM through a folder: on a CPU its layers refuse TRL's way, one parameter at a time."""

    def synchronise() -> None:
        trainer.accelerator.unwrap_model(trainer.model).save_pretrained(folder)
        trainer.vllm_generation.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(folder)})

    trainer.vllm_generation.sync_weights = synchronise


def main() -> None:
    """Train and log to the service of `FORESHOCK_URL`."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--algorithm", choices=TRAINERS, default="grpo")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--run-key", default="trl-example")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        trainer = new_trainer(Path(folder), algorithm=options.algorithm, steps=options.steps)

        from foreshock.integrations.trl import ForeshockCallback  # connects the trainer

        trainer.add_callback(ForeshockCallback(trainer, run_key=options.run_key))  # connects the trainer

        trainer.train()


if __name__ == "__main__":
    main()
