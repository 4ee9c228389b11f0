"""LoRA adapters as PEFT saves them: check one, load it over its base model, or merge the two.

An engine that loads an adapter computes W·x + B·(A·x). A merge rounds W + B·A to the engine's dtype, which in bfloat16
are other weights than those. So scorers load adapters by their engine's own way, and the two are merged, in float32,
only for scorers whose row in `foreshock.scorers` does not say that they can; the score's fingerprint then says so.
"""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

from foreshock.errors import WeightsError
from foreshock.parsing import parse_json
from foreshock.scorers import SCORERS

CONFIGURATION, TENSORS = "adapter_config.json", "adapter_model.safetensors"
_IN_A_LAYER = re.compile(r"\.(?:layers|h|blocks|block)\.\d+\.(?!.*\bexperts\b)")
_MODULE = re.compile(r"(?:.*\.)?(\w+)\.lora_[AB]\.")


class AdapterError(WeightsError):
    """The adapter cannot be used; the message has the reason."""


def is_adapter(folder: Path) -> bool:
    """Return whether a folder holds an adapter and no model."""
    return (folder / CONFIGURATION).is_file() and not (folder / "config.json").is_file()


def base_of(adapter: Path) -> str:
    """Return the name of the adapter's base model. Raises AdapterError if this is not a LoRA that PEFT saved."""
    found = _configuration(adapter)
    name, kind = found.get("base_model_name_or_path"), found.get("peft_type")
    # PEFT imports the module that `megatron_core` names if there is a `megatron_config`.
    if kind != "LORA" or found.get("megatron_config"):
        raise AdapterError(f"{CONFIGURATION} has peft_type={kind!r}; only LoRA is loaded, and not Megatron's")
    if not (adapter / TENSORS).is_file():
        raise AdapterError(f"{CONFIGURATION} is there without {TENSORS}")
    return str(name)


def base_folder_of(adapter: Path) -> Path:
    """Return the folder of an adapter's model, whose name is relative to here or to a folder above the adapter.

    Raises AdapterError if there is none.
    """
    name = base_of(adapter)
    for above in (Path.cwd(), *adapter.parents):
        if (above / name / "config.json").is_file():
            return (above / name).resolve()
    raise AdapterError(f"the adapter {adapter.name} belongs to {name!r}, which is no folder of a model")


def is_loaded_by(scorer: str, adapter: Path) -> bool:
    """Return True if the scorer's engine loads this adapter itself; else it gets the merged model."""
    way = SCORERS[scorer].adapters
    return way == "all" or (way == "layers" and all(_IN_A_LAYER.search(name) for name in _tensors(adapter)))


def rank_of(adapter: Path) -> int:
    """Return the largest rank of an adapter's modules. Raises AdapterError if its configuration gives none."""
    found = _configuration(adapter)
    ranks: list[Any] = [found.get("r"), *(found.get("rank_pattern") or {}).values()]
    if not all(isinstance(rank, int) and rank > 0 for rank in ranks):
        raise AdapterError(f"{CONFIGURATION} has ranks {ranks}; they must be whole numbers above 0")
    return int(max(ranks))


def modules_of(adapter: Path) -> list[str]:
    """Return the names of the modules that an adapter changes, without their layers: `q_proj`, `up_proj`."""
    return sorted({found[1] for name in _tensors(adapter) if (found := _MODULE.match(name))})


def with_adapter(model: Any, adapter: Path) -> Any:
    """Return PEFT's model of `model` with the adapter, in the dtype of the model's weights. Raises AdapterError."""
    try:
        from peft import PeftModel, get_peft_model_state_dict
    except ImportError as error:
        raise AdapterError("loading an adapter needs PEFT: pip install peft") from error
    base_of(adapter)
    try:
        with warnings.catch_warnings(action="ignore"):  # of missing tensors, which are an error below
            adapted = PeftModel.from_pretrained(model, adapter, autocast_adapter_dtype=False)
    except (ValueError, KeyError, RuntimeError, TypeError, OSError) as error:
        raise AdapterError(f"PEFT cannot load the adapter: {type(error).__name__}: {error}") from error
    # PEFT only warns of a tensor that the file lacks, and ignores one that the configuration does not describe.
    others = _tensors(adapter) ^ set(get_peft_model_state_dict(adapted, save_embedding_layers=False))
    if others:
        raise AdapterError(f"{TENSORS} and {CONFIGURATION} describe other tensors, such as {min(others)}")
    return adapted


def merged_model(adapter: Path, base: Path) -> Any:
    """Return the base model with the adapter merged, in float32. Raises AdapterError, and what `load_model` does."""
    import torch

    from foreshock_probes.scorers.forward_pass import load_model

    model = load_model(base, torch.float32, "sdpa", torch.device("cpu"))
    return with_adapter(model, adapter).merge_and_unload().eval()


def merge(adapter: Path, base: Path, into: Path) -> None:
    """Merge the adapter with the base model and write the result to the folder `into`. Raises AdapterError."""
    merged_model(adapter, base).save_pretrained(into)


def _configuration(adapter: Path) -> dict[str, Any]:
    try:
        found = parse_json((adapter / CONFIGURATION).read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise AdapterError(f"{CONFIGURATION} cannot be read: {type(error).__name__}: {error}") from error
    if not isinstance(found, dict) or "base_model_name_or_path" not in found:
        raise AdapterError(f"{CONFIGURATION} names no base_model_name_or_path")
    return found


def _tensors(adapter: Path) -> set[str]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(adapter / TENSORS, "np") as file:
            return set(file.keys())
    except (OSError, SafetensorError) as error:
        raise AdapterError(f"{TENSORS} cannot be read: {error}") from error
