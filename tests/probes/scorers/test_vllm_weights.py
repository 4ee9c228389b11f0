"""The comparison of what an engine holds with a checkpoint, on layers made as vLLM makes them on a CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from foreshock_probes.scorers.request import ReloadError
from foreshock_probes.scorers.vllm_weights import verify_weights

NAMES = ["model.q_proj.weight", "model.k_proj.weight", "model.norm.weight", "model.embed_tokens.weight"]


class Packed:
    """Applies a copy of the weights, as a kernel that packs them does."""

    def apply(self, layer: torch.nn.Module, inputs: torch.Tensor, bias: None) -> torch.Tensor:
        packed: Any = layer.cpu_linear
        found: torch.Tensor = inputs @ packed.t()
        return found


def layer(weight: torch.Tensor, *, keep: bool) -> Any:
    made: Any = torch.nn.Module()
    made.cpu_linear = weight.clone()
    made.quant_method = Packed()
    made.input_size_per_partition = weight.shape[1]
    made.weight = torch.nn.Parameter(weight.clone() if keep else weight.new_empty(0), requires_grad=False)
    return made


def engine_model(tensors: dict[str, torch.Tensor]) -> Any:
    """Return a model with a fused projection whose weights are only in the kernel, a norm, and padded embeddings."""
    query, key, norm, embeddings = (tensors[name].to(torch.bfloat16) for name in NAMES)
    model: Any = torch.nn.Module()
    inner: Any = torch.nn.Module()
    inner.qk_proj = layer(torch.cat([query, key]), keep=False)
    inner.norm = torch.nn.Module()
    inner.norm.weight = torch.nn.Parameter(norm)
    padded = torch.cat([embeddings, torch.zeros_like(embeddings)])
    inner.embed_tokens = torch.nn.Module()
    inner.embed_tokens.weight = torch.nn.Parameter(padded)
    model.model = inner
    model.lm_head = layer(padded, keep=True)
    model.packed_modules_mapping = {"qk_proj": ["q_proj", "k_proj"]}
    return model


def checkpoint(folder: Path) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    tensors = {name: torch.randn(6, 4) if name != NAMES[2] else torch.randn(4) for name in NAMES}
    folder.mkdir(exist_ok=True)
    for number, part in enumerate((NAMES[:1], NAMES[1:])):
        save_file({name: tensors[name] for name in part}, folder / f"model-{number}.safetensors")
    return tensors


def test_whole_checkpoint_is_found_in_the_engine(tmp_path: Path) -> None:
    verify_weights(engine_model(checkpoint(tmp_path)), tmp_path)


@pytest.mark.parametrize("name", NAMES)
def test_one_stale_value_in_any_tensor_is_found(tmp_path: Path, name: str) -> None:
    tensors = checkpoint(tmp_path)
    stale = tensors[name].clone()
    stale.view(-1)[-1] += 0.05
    with pytest.raises(ReloadError, match="does not hold the values of"):
        verify_weights(engine_model(tensors | {name: stale}), tmp_path)


def test_head_that_keeps_a_packed_copy_of_old_embeddings_is_found(tmp_path: Path) -> None:
    tensors = checkpoint(tmp_path)
    model = engine_model(tensors)
    model.lm_head.cpu_linear = model.lm_head.cpu_linear + 0.05
    with pytest.raises(ReloadError, match=r"lm_head\.weight"):
        verify_weights(model, tmp_path)


def test_parts_that_are_fused_in_another_order_are_found(tmp_path: Path) -> None:
    model = engine_model(checkpoint(tmp_path))
    model.packed_modules_mapping = {"qk_proj": ["k_proj", "q_proj"]}
    with pytest.raises(ReloadError, match="qk_proj"):
        verify_weights(model, tmp_path)


def test_parameter_without_a_tensor_in_the_checkpoint_is_refused(tmp_path: Path) -> None:
    model = engine_model(checkpoint(tmp_path))
    model.extra = torch.nn.Parameter(torch.zeros(3))
    with pytest.raises(ReloadError, match="cannot be compared"):
        verify_weights(model, tmp_path)
