"""Load other weights into a running vLLM engine, and verify that it holds each of them.

A reload can be partial without an error: a tied head on a CPU, for example, keeps its old copy. Therefore every
parameter of the engine is compared with the checkpoint's tensors, bit for bit after the cast to the engine's dtype.
Parameters that are stored unchanged are read from memory. Weights that were packed for a kernel are read through that
kernel: a linear layer applied to the identity matrix returns its weights exactly, because each output is one product
with 1 plus zeros. This costs about as much as scoring as many tokens as the model has hidden units.

Fused parameters are compared with their parts in the order of the model's `packed_modules_mapping`. Quantised weights
and stacked experts have no such mapping: they are refused, and the caller starts another engine.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from foreshock.notary.engines import is_packed, read_through_kernel
from foreshock_probes.scorers.forward_pass import CheckpointTensors
from foreshock_probes.scorers.request import ReloadError


def reload_and_verify(llm: Any, folder: Path) -> None:
    """Load the checkpoint in `folder` into the running engine `llm` (`vllm.LLM`, its model in this process).

    Raises ReloadError if the engine cannot reload, or does not hold all of the checkpoint afterwards.
    """

    def read_buffers(model: Any) -> dict[str, torch.Tensor]:
        return {name: value.detach().clone() for name, value in model.named_buffers()}

    try:
        buffers = llm.apply_model(read_buffers)[0]
        llm.collective_rpc("reload_weights", kwargs={"weights_path": str(folder)})
        llm.apply_model(_pack_heads_again)
    except Exception as error:
        # After any error, whichever a release of the engine raises, its weights are unknown.
        raise ReloadError(f"reload_weights failed with {type(error).__name__}: {error}") from error

    def verify(model: Any) -> None:
        for name, value in model.named_buffers():
            if name not in buffers or not _equal(value, buffers[name]):
                raise ReloadError(f"the reload changed the buffer {name!r}, which is no part of a checkpoint")
        verify_weights(model, folder)

    llm.apply_model(verify)


def _pack_heads_again(model: Any) -> None:
    """Pack heads again from their present weights, because a reload leaves out a head tied to the embeddings."""
    for module in model.modules():
        if is_packed(module) and module.weight.numel():
            module.quant_method.process_weights_after_loading(module)


@torch.no_grad()
def verify_weights(model: Any, folder: Path) -> None:
    """Raise ReloadError if `model` does not hold each tensor of the checkpoint in `folder`, or one cannot be read."""
    modules = dict(model.named_modules(remove_duplicate=False))
    checkpoint = CheckpointTensors(folder)
    fused: dict[str, list[str]] = dict(getattr(model, "packed_modules_mapping", {}))
    for name, parameter in model.named_parameters(remove_duplicate=False):
        path, _, kind = name.rpartition(".")
        module = modules[path]
        names = _names_in_checkpoint(path, kind, fused, checkpoint)
        held = list(_held(module, kind, parameter))
        if not names or not held:
            raise ReloadError(f"the parameter {name!r} cannot be compared with the checkpoint")
        expected = torch.cat([checkpoint.tensor(each).to(parameter.device) for each in names])
        for values in held:
            if values.shape[1:] != expected.shape[1:] or values.shape[0] < expected.shape[0]:
                shapes = f"the shape {list(values.shape)}, the checkpoint's {list(expected.shape)}"
                raise ReloadError(f"the parameter {name!r} has {shapes}")
            # Embeddings are padded to a round number of rows.
            if not _equal(values[: expected.shape[0]], expected.to(parameter.dtype).to(values.dtype)):
                raise ReloadError(f"the parameter {name!r} does not hold the values of {', '.join(names)}")


def _names_in_checkpoint(path: str, kind: str, fused: dict[str, list[str]], checkpoint: CheckpointTensors) -> list[str]:
    """Return the names of the tensors that form a parameter, in order; empty if they are not known."""
    parent, _, last = path.rpartition(".")
    parts = [f"{parent}.{part}.{kind}" for part in fused.get(last, [last])] if parent else [f"{path}.{kind}"]
    if all(part in checkpoint.names for part in parts):
        return parts
    # The head of a model with tied embeddings.
    embeddings = [name for name in checkpoint.names if name.endswith("embed_tokens.weight")]
    return embeddings if last == "lm_head" and kind == "weight" and len(embeddings) == 1 else []


def _held(module: Any, kind: str, parameter: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the values of a parameter from each place where the engine keeps them."""
    if parameter.numel():
        yield parameter
    if kind == "weight" and is_packed(module):
        try:
            yield read_through_kernel(module)
        except ValueError as error:
            raise ReloadError(str(error)) from error


def _equal(held: torch.Tensor, expected: torch.Tensor) -> bool:
    """Return True if two tensors are equal; subnormal numbers count as 0, as in some kernels."""
    if held.shape != expected.shape or held.dtype != expected.dtype:
        return False
    if not held.is_floating_point():
        return torch.equal(held, expected)
    tiny = torch.finfo(held.dtype).tiny
    zero = torch.zeros((), dtype=held.dtype, device=held.device)
    return torch.equal(torch.where(held.abs() < tiny, zero, held), torch.where(expected.abs() < tiny, zero, expected))
