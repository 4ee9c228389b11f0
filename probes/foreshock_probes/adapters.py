"""Merge LoRA adapters, as PEFT saves them, with their base model into a checkpoint that every scorer can load.

W + scale · B A is computed and stored in float32, so that a scorer rounds only once, to the dtype in which it scores.
"""

import json
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foreshock.errors import WeightsError

if TYPE_CHECKING:
    import torch

CONFIGURATION = "adapter_config.json"
_PREFIX = "base_model.model."
# Settings of PEFT that may change the weights otherwise than by W + scale · B A, and their harmless values.
_PLAIN: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "use_dora": (False, None),
    "fan_in_fan_out": (False, None),
    "modules_to_save": (None, []),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
    "layer_replication": (None,),
}


class AdapterError(WeightsError):
    """The adapter cannot be merged; the message has the reason."""


def is_adapter(folder: Path) -> bool:
    """Return whether a folder holds an adapter and no model."""
    return (folder / CONFIGURATION).is_file() and not (folder / "config.json").is_file()


def configuration_of(adapter: Path) -> dict[str, Any]:
    """Return the adapter's configuration. Raises AdapterError if the adapter cannot be merged."""
    try:
        found = json.loads((adapter / CONFIGURATION).read_text("utf-8"))
        name, rank, alpha = found["base_model_name_or_path"], int(found["r"]), float(found["lora_alpha"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise AdapterError(f"{CONFIGURATION} cannot be read: {type(error).__name__}: {error}") from error
    for setting, plain in _PLAIN.items():
        if setting in found and found[setting] not in plain:
            raise AdapterError(f"{CONFIGURATION} has {setting}={found[setting]!r}, which is not merged here")
    scale = alpha / (math.sqrt(rank) if found.get("use_rslora") else rank)
    return {"base": str(name), "scale": scale}


def deltas_of(adapter: Path) -> dict[str, "torch.Tensor"]:
    """Return the float32 values that an adapter adds to each tensor of its base model. Raises AdapterError."""
    import torch
    from safetensors.torch import load_file

    scale = configuration_of(adapter)["scale"]
    parts = load_file(adapter / "adapter_model.safetensors")
    left = [name.removesuffix(".lora_A.weight") for name in parts if name.endswith(".lora_A.weight")]
    others = [name for name in parts if not name.endswith((".lora_A.weight", ".lora_B.weight"))]
    if others or not left:
        raise AdapterError(f"the adapter has {others[0] if others else 'no lora_A'}, which is not merged here")
    found = {}
    for module in left:
        down, up = (parts[f"{module}.lora_{side}.weight"].to(torch.float32) for side in "AB")
        found[module.removeprefix(_PREFIX) + ".weight"] = scale * (up @ down)
    return found


def merge(adapter: Path, base: Path, into: Path) -> None:
    """Merge the adapter with the base model and write the result to the folder `into`. Raises AdapterError."""
    import torch
    from safetensors.torch import load_file, save_file

    deltas = deltas_of(adapter)
    into.mkdir(parents=True)
    for file in sorted(base.iterdir()):
        if file.suffix == ".safetensors":
            tensors = load_file(file)
            for name in tensors.keys() & deltas.keys():
                tensors[name] = (tensors[name].to(torch.float32) + deltas.pop(name)).contiguous()
            save_file(tensors, into / file.name, {"format": "pt"})
        elif file.suffix == ".json":
            shutil.copy(file, into / file.name)
    if deltas:
        raise AdapterError(f"the base model has no tensor {min(deltas)}, which the adapter changes")
