"""The kind of a model, which decides its healthy ranges: declared by the run or derived from a model configuration."""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Literal

from foreshock.parsing import parse_json

ModelKind = Literal["dense", "moe"]

MODEL_KINDS: Final[tuple[ModelKind, ...]] = ("dense", "moe")
MODEL_KIND_NAMES: Final[Mapping[ModelKind, str]] = {"dense": "dense model", "moe": "mixture of experts"}

# Keys of config.json that hold the number of experts that a router chooses from.
_EXPERT_KEYS: Final = frozenset({
    "num_experts",        # Qwen-MoE, OLMoE, Jamba, Hunyuan
    "n_routed_experts",   # DeepSeek, GLM-4.5, Kimi
    "num_local_experts",  # Mixtral, gpt-oss, Llama 4, Phi-MoE, Granite-MoE, MiniMax
    "moe_num_experts",    # DBRX, ERNIE 4.5, JetMoe
    "num_moe_experts",    # Megatron
})  # fmt: skip
# A key that every configuration of a language model has, in itself or in its text part.
_MODEL_KEYS: Final = frozenset({"model_type", "architectures", "hidden_size"})
# text_config and ffn_config are at depth 2; nothing is deeper.
_LARGEST_DEPTH: Final = 4
_LARGEST_FILE_BYTES: Final = 1 << 20


def judged_as(model_kind: ModelKind | None) -> ModelKind:
    """Return the kind whose ranges apply: an unknown kind is judged as dense, the stricter one."""
    return "dense" if model_kind is None else model_kind


def known_model_kind(value: object) -> ModelKind | None:
    """Return `value` if it is a kind of model, else None."""
    return next((kind for kind in MODEL_KINDS if kind == value), None)


# Shown with every verdict on a run whose model kind is unknown.
UNDECLARED_NOTE: Final = (
    "The model kind is unknown, so the ranges of a dense model hold. If the model is a mixture of experts, declare it: "
    'start_run(model_kind="moe"), or PATCH the run.'
)


def model_kind_of_configuration(configuration: Mapping[str, Any]) -> ModelKind | None:
    """Return the kind of the model that a Hugging Face `config.json` describes; None if it describes no model.

    A model is a mixture of experts if any of its parts has a router over more than one expert.
    """
    describes_model = False
    for part in _parts(configuration, 0):
        if any(_largest(part.get(key)) > 1 for key in _EXPERT_KEYS):
            return "moe"
        describes_model = describes_model or bool(_MODEL_KEYS & part.keys())
    return "dense" if describes_model else None


def model_kind_of_folder(folder: str | os.PathLike[str]) -> ModelKind | None:
    """Return the kind of the model in a checkpoint folder; None if its config.json is missing or invalid."""
    path = Path(folder) / "config.json"
    try:
        if path.stat().st_size > _LARGEST_FILE_BYTES:
            return None
        configuration = parse_json(path.read_bytes())
    except (OSError, ValueError):
        return None
    return model_kind_of_configuration(configuration) if isinstance(configuration, dict) else None


def _parts(configuration: Mapping[str, Any], depth: int) -> Iterator[Mapping[str, Any]]:
    """Yield a configuration and the configurations inside of it, such as `text_config`."""
    yield configuration
    if depth < _LARGEST_DEPTH:
        for value in configuration.values():
            if isinstance(value, Mapping):
                yield from _parts(value, depth + 1)


def _largest(value: object) -> int:
    """Return a number of experts; the largest of a list (one per layer or modality); 0 if `value` is neither."""
    if isinstance(value, bool):
        return 0
    if isinstance(value, int):
        return value
    if isinstance(value, list):
        return max(map(_largest, value), default=0)
    return 0
