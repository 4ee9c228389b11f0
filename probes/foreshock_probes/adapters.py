"""Merge LoRA adapters, as PEFT saves them, with their base model into a checkpoint that every scorer can load.

PEFT merges, in float32, so that a scorer rounds only once, to the dtype in which it scores.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from foreshock.errors import WeightsError
from foreshock.parsing import parse_json

CONFIGURATION, TENSORS = "adapter_config.json", "adapter_model.safetensors"


class AdapterError(WeightsError):
    """The adapter cannot be merged; the message has the reason."""


def is_adapter(folder: Path) -> bool:
    """Return whether a folder holds an adapter and no model."""
    return (folder / CONFIGURATION).is_file() and not (folder / "config.json").is_file()


def base_of(adapter: Path) -> str:
    """Return the name of the adapter's base model. Raises AdapterError if this is no LoRA that PEFT saved."""
    try:
        found = parse_json((adapter / CONFIGURATION).read_text("utf-8"))
        name, kind = found["base_model_name_or_path"], found["peft_type"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise AdapterError(f"{CONFIGURATION} cannot be read: {type(error).__name__}: {error}") from error
    # PEFT imports the module that `megatron_core` names if there is a `megatron_config`.
    if kind != "LORA" or found.get("megatron_config"):
        raise AdapterError(f"{CONFIGURATION} has peft_type={kind!r}; only LoRA is merged, and not Megatron's")
    if not (adapter / TENSORS).is_file():
        raise AdapterError(f"{CONFIGURATION} is there without {TENSORS}")
    return str(name)


def merged_model(adapter: Path, base: Path) -> Any:
    """Return the base model with the adapter merged, in float32. Raises AdapterError, and what `load_model` does."""
    import torch
    from safetensors import safe_open

    from foreshock_probes.scorers.forward_pass import load_model

    try:
        from peft import PeftModel, get_peft_model_state_dict
    except ImportError as error:
        raise AdapterError("merging an adapter needs PEFT: pip install peft") from error
    base_of(adapter)
    model = load_model(base, torch.float32, "sdpa", torch.device("cpu"))
    try:
        with warnings.catch_warnings(action="ignore"):  # of missing tensors, which are an error below
            adapted = PeftModel.from_pretrained(model, adapter)
    except (ValueError, KeyError, RuntimeError, TypeError, OSError) as error:
        raise AdapterError(f"PEFT cannot load the adapter: {type(error).__name__}: {error}") from error
    with safe_open(adapter / TENSORS, "pt") as file:
        # PEFT only warns of a tensor that the file lacks, and ignores one that the configuration does not describe.
        others = set(file.keys()) ^ set(get_peft_model_state_dict(adapted, save_embedding_layers=False))
    if others:
        raise AdapterError(f"{TENSORS} and {CONFIGURATION} describe other tensors, such as {min(others)}")
    return adapted.merge_and_unload().eval()


def merge(adapter: Path, base: Path, into: Path) -> None:
    """Merge the adapter with the base model and write the result to the folder `into`. Raises AdapterError."""
    merged_model(adapter, base).save_pretrained(into)
