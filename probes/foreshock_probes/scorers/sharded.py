"""Forward passes of a model that is divided among several processes: the option `shards` of torch's scorers.

The processes divide the batches: each computes every n-th batch, with the same composition and the same operations as
an undivided model. They share the parameters (FSDP2): each holds a part of every parameter and gathers one layer at a
time. The head is the exception: each process holds all of it, because it is applied to one piece of a batch after
another. A process needs the memory of the whole model divided by the number of processes, plus the largest layer and
the head. It reads only its own part of the checkpoint.
"""

import contextlib
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from foreshock.fingerprint import Fingerprint
from foreshock_probes.scorers.forward_pass import (
    CheckpointTensors,
    TokenBatch,
    check_logits,
    head_in,
    logits_fit,
    precision,
)
from foreshock_probes.scorers.rank_processes import Rank, RankProcesses, check_devices
from foreshock_probes.scorers.request import Report, Scored, ScoreRequest, UnsupportedScoreError, WarmModel
from foreshock_probes.scorers.torch_forward import (
    ForwardPass,
    TrainerOptions,
    prepare_forward_pass,
    score_batch,
    uses_gpu,
)


@dataclass(frozen=True, slots=True)
class _Task:
    request: ScoreRequest
    options: TrainerOptions


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """A rank's log-probs [T], NaN for tokens of other ranks, and the seconds that it took to load the model."""

    log_probs: NDArray[np.float32]
    fingerprint: Fingerprint
    loading_seconds: float


def score_on_ranks(request: ScoreRequest, options: TrainerOptions, warm: WarmModel, report: Report) -> Scored:
    """Score all response tokens of the request in `options.shards` processes, which are kept for the next request.

    Raises UnsupportedScoreError, TooFewDevicesError if there are fewer devices than shards, and RankError.
    """
    check_devices("shards", options.shards)
    on_gpus = uses_gpu(request)
    ranks = warm.get(
        ("ranks", options.shards, on_gpus), lambda: RankProcesses(options.shards, _score_part, on_gpus=on_gpus)
    )
    try:
        parts: list[_Part] = ranks.run(_Task(request, options), report)
    except BaseException:
        warm.drop()
        raise
    warm.loading_seconds += max(part.loading_seconds for part in parts)
    log_probs = parts[0].log_probs.copy()
    for part in parts[1:]:
        known = ~np.isnan(part.log_probs)
        log_probs[known] = part.log_probs[known]
    return Scored(log_probs=log_probs, fingerprint=parts[0].fingerprint)


def _score_part(rank: Rank, task: _Task, report: Report) -> _Part:
    """Score the rank's batches. All ranks call the decoder equally often, because each call gathers parameters."""
    request, options, before = task.request, task.options, rank.warm.loading_seconds
    flags = {"shards": str(rank.ranks)}
    forward = prepare_forward_pass(request, options, rank.warm, flags, load=load_sharded_model, device=rank.device)
    log_probs = np.full(request.rollouts.num_tokens, np.nan, dtype=np.float32)
    batches = forward.plan.batches
    done = 0
    with torch.no_grad(), head_in(forward.model, forward.head_dtype):
        _check_logits(forward, request, options)
        for turn in range(math.ceil(len(batches) / rank.ranks)):
            index = turn * rank.ranks + rank.number
            batch = _batch(request, options, batches[index], rank.device) if index < len(batches) else None
            if batch is None or batch.ids.shape[1] < 2:
                _call_decoder(forward)
            else:
                score_batch(forward, batch, batches[index], options, log_probs)
            done += batch.num_response_tokens if batch is not None else 0
            report(done)
    return _Part(log_probs, forward.fingerprint, rank.warm.loading_seconds - before)


def _batch(request: ScoreRequest, options: TrainerOptions, rows: NDArray[np.int64], device: torch.device) -> TokenBatch:
    return TokenBatch(request.rollouts, rows, options.padding, device)


def _check_logits(forward: ForwardPass, request: ScoreRequest, options: TrainerOptions) -> None:
    """Check the model in all ranks if any rank's batch needs logits in pieces; the check calls the decoder."""
    cpu = torch.device("cpu")
    sizes = (_batch(request, options, rows, cpu).ids.shape for rows in forward.plan.batches)
    if not all(logits_fit(forward.model, size, options.logits_bytes) for size in sizes):
        with precision(forward.device, forward.autocast):
            check_logits(forward.model, torch.arange(2, device=forward.device)[None])


def _call_decoder(forward: ForwardPass) -> None:
    ids: Any = torch.zeros((1, 2), dtype=torch.int64, device=forward.device)
    with precision(forward.device, forward.autocast):
        forward.model.get_decoder()(input_ids=ids, use_cache=False)


# transformers stacks the experts of a layer in one parameter; checkpoints store each expert separately.
_STACKED_EXPERTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


def load_sharded_model(folder: Path, dtype: torch.dtype, attention_implementation: str, device: torch.device) -> Any:
    """Load this process' part of the model in `folder` in `dtype`, in evaluation mode.

    All processes of the default process group must call it, and must then call the decoder equally often. Raises
    UnsupportedScoreError as `load_model` does, and if names of tensors in the checkpoint differ from the parameters'.
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
    """Return the model with its buffers, and with parameters that have only a shape; no parameter is tied."""
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
    # The embeddings are divided and the head is not, so a tied head needs a parameter of its own.
    head.weight = nn.Parameter(torch.empty_like(head.weight, device="meta"), requires_grad=False)
    return model.requires_grad_(False)


@contextlib.contextmanager
def _parameters_without_memory() -> Iterator[None]:
    """Within the block, new parameters of modules are on the meta device; buffers are computed as usual."""
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
    # Rows are divided as torch.chunk does: all parts but the last ones have the same size.
    size = -(-parameter.shape[0] // mesh.size())
    start = min(mesh.get_local_rank() * size, parameter.shape[0])
    stop = min(start + size, parameter.shape[0])
    # A copy, because the values read may be a view of the whole file.
    values = _rows(name, checkpoint, parameter.shape, start, stop).to(device, parameter.dtype, copy=True)
    part = DTensor.from_local(
        values, mesh, parameter.placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
    )
    return nn.Parameter(part, requires_grad=False)


def _rows(name: str, checkpoint: CheckpointTensors, shape: torch.Size, start: int, stop: int) -> torch.Tensor:
    """Return the rows from `start` to `stop` of the parameter `name`, whose shape is `shape`.

    Raises UnsupportedScoreError if the checkpoint has no such parameter or its shape differs.
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
