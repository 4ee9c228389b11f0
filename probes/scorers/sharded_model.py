"""A causal language model whose parameters are divided among the processes of a torch process group (FSDP2).

Each process holds a part of every parameter and gathers one layer at a time, as it is needed. The head is the
exception: each process holds all of it, because it is applied to one piece of a batch after another. So the memory of
a process is that of the whole model divided by the processes, plus the largest layer and the head. A process reads
only its own part of the checkpoint.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from foreshock_probes.scorers.checkpoint_tensors import CheckpointTensors
from foreshock_probes.scorers.request import UnsupportedScoreError

__all__ = ["load_sharded_model"]

# transformers stacks the experts of a layer in one parameter, checkpoints have each by itself.
_STACKED_EXPERTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


def load_sharded_model(folder: Path, dtype: torch.dtype, attention_implementation: str, device: torch.device) -> Any:
    """Load this process' part of the model in `folder` in `dtype`, in evaluation mode.

    All processes of the default process group must call it, and must then call the decoder equally often. Raises
    UnsupportedScoreError as `load_model` does, and if the checkpoint's tensors are not named as the parameters.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = _model_without_weights(folder, dtype, attention_implementation)
    mesh = init_device_mesh(device.type, (torch.distributed.get_world_size(),))
    for module in _groups(model):
        fully_shard(module, mesh=mesh, reshard_after_forward=True)
    checkpoint = CheckpointTensors(folder)
    parts = {name: _part(name, parameter, checkpoint, device) for name, parameter in model.named_parameters()}
    model.load_state_dict(parts, assign=True, strict=False)
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            module._buffers[name] = buffer.to(device)
    return model.eval().requires_grad_(False)


def _model_without_weights(folder: Path, dtype: torch.dtype, attention_implementation: str) -> Any:
    """Return the model with its buffers, and with parameters that have a shape only; none is tied to another."""
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        configuration = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        with _parameters_without_memory():
            model = AutoModelForCausalLM.from_config(
                configuration, dtype=dtype, attn_implementation=attention_implementation, trust_remote_code=False
            )
    except (ValueError, ImportError, OSError, KeyError, RuntimeError) as error:
        raise UnsupportedScoreError(f"transformers cannot load the checkpoint: {error}") from error
    head = model.get_output_embeddings()
    # The embeddings are divided and the head is not, so that a tied head needs a parameter of its own.
    head.weight = nn.Parameter(torch.empty_like(head.weight, device="meta"), requires_grad=False)
    return model.requires_grad_(False)


@contextlib.contextmanager
def _parameters_without_memory() -> Iterator[None]:
    """Move each parameter that a module gets within the block to the meta device; buffers are computed as usual."""
    plain = nn.Module.register_parameter

    def register(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        plain(module, name, None if parameter is None else nn.Parameter(parameter.to("meta"), requires_grad=False))

    nn.Module.register_parameter = register  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = plain  # type: ignore[method-assign]


def _groups(model: Any) -> list[nn.Module]:
    """Return the modules whose parameters are gathered together: each layer, and each other module with parameters."""
    kinds = set(getattr(model, "_no_split_modules", None) or ())
    layers = [module for module in model.modules() if type(module).__name__ in kinds]
    inside = {each for layer in layers for each in layer.modules()}
    inside |= set(model.get_output_embeddings().modules())
    others = [each for each in model.modules() if each not in inside and any(True for _ in each.parameters(False))]
    return [*layers, *others]


def _part(name: str, parameter: nn.Parameter, checkpoint: CheckpointTensors, device: torch.device) -> nn.Parameter:
    """Return this process' part of a parameter, read from the checkpoint; all of it if it is not divided."""
    from torch.distributed.tensor import DTensor

    if not isinstance(parameter, DTensor):
        values = _rows(name, checkpoint, parameter.shape, 0, parameter.shape[0])
        return nn.Parameter(values.to(device, parameter.dtype, copy=True), requires_grad=False)
    mesh = parameter.device_mesh
    # Rows are divided as by torch.chunk: all parts have the same size but the last ones.
    size = -(-parameter.shape[0] // mesh.size())
    start = min(mesh.get_local_rank() * size, parameter.shape[0])
    stop = min(start + size, parameter.shape[0])
    # A copy, because what is read may be a view of the whole file.
    values = _rows(name, checkpoint, parameter.shape, start, stop).to(device, parameter.dtype, copy=True)
    part = DTensor.from_local(
        values, mesh, parameter.placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
    )
    return nn.Parameter(part, requires_grad=False)


def _rows(name: str, checkpoint: CheckpointTensors, shape: torch.Size, start: int, stop: int) -> torch.Tensor:
    """Return the rows from `start` to `stop` of the parameter `name`, whose shape is `shape`.

    Raises UnsupportedScoreError if the checkpoint has no such parameter, or one of another shape.
    """
    source = name
    if name not in checkpoint.names:
        stacked = re.fullmatch(r"(.*\.experts)\.(\w+)", name)
        if stacked and stacked[2] in _STACKED_EXPERTS:
            parts = [f"{stacked[1]}.{{}}.{part}.weight" for part in _STACKED_EXPERTS[stacked[2]]]
            if all(part.format(expert) in checkpoint.names for part in parts for expert in range(shape[0])):
                experts = [
                    torch.cat([checkpoint.tensor(part.format(expert)) for part in parts])
                    for expert in range(start, stop)
                ]
                found = torch.stack(experts) if experts else torch.empty(0, *shape[1:])
                return _checked(name, found, (stop - start, *shape[1:]))
        embeddings = [each for each in checkpoint.names if each.endswith("embed_tokens.weight")]
        if name != "lm_head.weight" or len(embeddings) != 1:
            raise UnsupportedScoreError(
                f"the checkpoint has no tensor {name!r}, a parameter of the model; set the option shards to 1, "
                "with which checkpoints whose tensors have other names are loaded"
            )
        source = embeddings[0]
    if checkpoint.shape(source) != tuple(shape):
        raise UnsupportedScoreError(
            f"the tensor {source!r} of the checkpoint has the shape {list(checkpoint.shape(source))}, the model's "
            f"parameter {list(shape)}"
        )
    return checkpoint.rows(source, start, stop)


def _checked(name: str, found: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    if tuple(found.shape) != shape:
        raise UnsupportedScoreError(
            f"the experts of {name!r} have the shape {list(found.shape)} in the checkpoint, expected {list(shape)}"
        )
    return found
