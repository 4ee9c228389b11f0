"""A tiny model's weights over steps, an engine that holds them in tensor-parallel shards, and what can go wrong."""

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch

from foreshock.notary import Holding, held_by, joined, tensors_of

HIDDEN, HEADS, KEYS, SIZE, INNER, VOCABULARY, LAYERS = 16, 4, 2, 4, 24, 50, 2
Weights = dict[str, torch.Tensor]


def weights_of(step: int, *, tied: bool = False) -> Weights:
    """Return the trainer's float32 weights at a step."""
    shapes = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN), "model.norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        for name, rows in (("q", HEADS * SIZE), ("k", KEYS * SIZE), ("v", KEYS * SIZE)):
            shapes[f"{prefix}.self_attn.{name}_proj.weight"] = (rows, HIDDEN)
            shapes[f"{prefix}.self_attn.{name}_proj.bias"] = (rows,)
        shapes[f"{prefix}.self_attn.o_proj.weight"] = (HIDDEN, HEADS * SIZE)
        shapes[f"{prefix}.mlp.gate_proj.weight"] = shapes[f"{prefix}.mlp.up_proj.weight"] = (INNER, HIDDEN)
        shapes[f"{prefix}.mlp.down_proj.weight"] = (HIDDEN, INNER)
    if not tied:
        shapes["lm_head.weight"] = (VOCABULARY, HIDDEN)
    start = {name: torch.randn(shape, generator=_seed(0, place)) for place, (name, shape) in enumerate(shapes.items())}
    return {
        name: values + step * 0.01 * torch.randn(values.shape, generator=_seed(step, place))
        for place, (name, values) in enumerate(start.items())
    }


def _seed(step: int, place: int) -> torch.Generator:
    return torch.Generator().manual_seed(1000 * step + place)


class Layer(torch.nn.Module):
    """A layer of an engine: a weight, perhaps a bias, and the attributes that say how it is fused and sharded."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None, **attributes: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight, requires_grad=False)
        if bias is not None:
            self.bias = torch.nn.Parameter(bias, requires_grad=False)
        for name, value in attributes.items():
            setattr(self, name, value)


def engine_of(weights: Mapping[str, torch.Tensor], rank: int = 0, shards: int = 1) -> torch.nn.Module:
    """Return a rank's model of an engine, as vLLM and SGLang fuse, shard and pad it."""
    place: dict[str, Any] = {"tp_rank": rank, "tp_size": shards}
    rows = VOCABULARY // shards
    indices = SimpleNamespace(org_vocab_start_index=rank * rows, org_vocab_end_index=(rank + 1) * rows)

    def part(name: str, dimension: int = 0) -> torch.Tensor:
        return weights[name].chunk(shards, dimension)[rank]

    def table(name: str) -> Layer:
        values = torch.nn.functional.pad(part(name), (0, 0, 0, 14))
        return Layer(values, shard_indices=indices, **place)

    model = torch.nn.Module()
    model.model = torch.nn.Module()
    model.model.embed_tokens = table("model.embed_tokens.weight")
    model.model.norm = Layer(weights["model.norm.weight"])
    model.model.layers = torch.nn.ModuleList()
    for number in range(LAYERS):
        layer, prefix = torch.nn.Module(), f"model.layers.{number}"
        layer.self_attn, layer.mlp = torch.nn.Module(), torch.nn.Module()
        names = [f"{prefix}.self_attn.{name}_proj" for name in "qkv"]
        layer.self_attn.qkv_proj = Layer(
            torch.cat([part(f"{name}.weight") for name in names]),
            torch.cat([part(f"{name}.bias") for name in names]),
            num_heads=HEADS // shards, num_kv_heads=KEYS // shards, head_size=SIZE, num_kv_head_replicas=1, **place,
        )  # fmt: skip
        layer.self_attn.o_proj = Layer(
            part(f"{prefix}.self_attn.o_proj.weight", 1),
            input_size=HEADS * SIZE, input_size_per_partition=HEADS * SIZE // shards, **place,
        )  # fmt: skip
        gates = [part(f"{prefix}.mlp.{name}_proj.weight") for name in ("gate", "up")]
        layer.mlp.gate_up_proj = Layer(torch.cat(gates), output_sizes=[INNER, INNER], **place)
        layer.mlp.down_proj = Layer(
            part(f"{prefix}.mlp.down_proj.weight", 1),
            input_size=INNER, input_size_per_partition=INNER // shards, **place,
        )  # fmt: skip
        model.model.layers.append(layer)
    if "lm_head.weight" in weights:
        model.lm_head = table("lm_head.weight")
    return model


def announced(weights: Weights) -> Holding:
    """Return what the trainer announces: float32 weights that are delivered in bfloat16."""
    return Holding(tensors_of(weights, torch.bfloat16))


def held(
    weights: Weights,
    shards: int = 2,
    change: Callable[[torch.nn.Module, int], Any] | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Holding:
    """Return what an engine reports that was sent the weights in `dtype`, after `change(model, rank)`."""
    ranks = []
    for rank in range(shards):
        model = engine_of({name: values.to(dtype) for name, values in weights.items()}, rank, shards)
        if change is not None:
            change(model, rank)
        ranks.append(held_by(model))
    return Holding(joined(ranks))
