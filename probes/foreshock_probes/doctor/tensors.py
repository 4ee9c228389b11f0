"""Edits of a model's tensors under a change: parts of other weights; tensors that are quantised, moved or scaled."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import torch

from foreshock.doctor.changes import CannotTryError, Change

State = dict[str, torch.Tensor]
Edit = Callable[..., State]
"""A function of the tensors, the configuration and arguments."""

_PARTS = {
    "": r"layers\.",
    "mlp": r"layers\..*\.mlp\.",
    "gate_up": r"layers\..*\.(gate_proj|up_proj|gate_up_proj)\b",
    "attention": r"layers\..*\.self_attn\.",
    "norms": r"norm\.weight$",
    "rank": r"\.(q|k|v|o|gate|up|gate_up|down)_proj\b(?!.*norm)|embed_tokens|lm_head",
    "expert": r"\.experts\.",
}
"""Names of the tensors of a part; a part that is not here is the name of a projection."""
_NORM = r"(?<!\.[qk]_)norm\.weight$"


def edited(state: State, change: Change, config: Any, held: Callable[[str, State], State]) -> State:
    """Return the tensors under a change. `held` returns the tensors of other weights with the names of given ones.

    Raises CannotTryError.
    """
    if part := change.get("part"):
        own = {name: state[name] for name in _names_of(state, part[1], config)}
        state |= {name: _joined(own[name], other, part[1], name) for name, other in held(part[0], own).items()}
    if delta := change.get("delta"):
        other = held(delta[0], state)
        state = {name: other[name] + delta[1] * (value - other[name]) for name, value in state.items()}
    if change.get("quantise"):
        kind, _, of_part = change.get("quantise").partition("/")
        state = {
            name: quantised(value, kind) if value.dim() > 1 and re.search(_PARTS[of_part], name) else value
            for name, value in state.items()
        }
    if edit := change.get("tensors"):
        state = _EDITS[edit[0]](state, config, *edit[1:])
    return state


def quantised(values: torch.Tensor, kind: str) -> torch.Tensor:
    """Return `values` rounded to a narrower format and back, in their own dtype.

    `fp8` and `fp8_e5m2` have the scale 1, `fp8_tensor` one scale per tensor, `fp8_channel` one per output row (or token
    of an activation), `fp8_block` one per block of 128 × 128 (or 128 values of an activation). `int8_channel` and
    `int4_group` (128 inputs, or all inputs of a row) are symmetric.
    """
    wide = values.float()
    if kind in ("fp8", "fp8_e5m2"):
        wide = wide.clamp(-448, 448) if kind == "fp8" else wide
        return wide.to(torch.float8_e4m3fn if kind == "fp8" else torch.float8_e5m2).to(values.dtype)
    if kind == "fp8_block":
        scale = _largest_of_blocks(wide) / 448
    elif kind.startswith("fp8"):
        scale = (wide.abs().amax() if kind == "fp8_tensor" else wide.abs().amax(-1, keepdim=True)) / 448
    if kind.startswith("fp8"):
        return ((wide / scale.clamp(min=1e-12)).to(torch.float8_e4m3fn).float() * scale).to(values.dtype)
    largest = 127 if kind == "int8_channel" else 7
    size = 128 if kind == "int4_group" and wide.shape[-1] % 128 == 0 else wide.shape[-1]
    parts = wide.reshape(*wide.shape[:-1], -1, size)
    scale = parts.abs().amax(-1, keepdim=True).clamp(min=1e-12) / largest
    return ((parts / scale).round().clamp(-largest, largest) * scale).reshape(wide.shape).to(values.dtype)


def _largest_of_blocks(wide: torch.Tensor) -> torch.Tensor:
    found = wide.abs()
    for axis in (-1, -2) if wide.dim() == 2 else (-1,):
        size = found.shape[axis]
        parts = [found.narrow(axis, at, min(128, size - at)) for at in range(0, size, 128)]
        found = torch.cat([each.amax(axis, keepdim=True).expand_as(each) for each in parts], axis)
    return found


def _names_of(state: State, part: str, config: Any) -> list[str]:
    if part == "layers":
        return [name for name in state if part_of(name).startswith("layers.")]
    if stage := re.fullmatch(r"layers\.(\d+)-(\d+)", part):
        parts = {f"layers.{layer}" for layer in range(int(stage[1]), int(stage[2]) + 1)}
        return [name for name in state if part_of(name) in parts]
    if part == "embeddings" and config.tie_word_embeddings:
        return [name for name in state if part_of(name) in ("embeddings", "lm_head")]
    names = [name for name in state if part_of(name) == part]
    pattern = _PARTS.get(part.partition(" ")[0], rf"\.{re.escape(part)}\b")
    return names or [name for name in state if re.search(pattern, name)]


def _joined(mine: torch.Tensor, other: torch.Tensor, part: str, name: str) -> torch.Tensor:
    """Return `other`, or `mine` with an expert or with the piece of a tensor-parallel rank of `other`."""
    if expert := re.fullmatch(r"expert (\d+)", part):
        if re.search(r"experts\.\d+\.", name):
            raise CannotTryError(f"{name} does not hold all experts")
        mine = mine.clone()
        mine[int(expert[1])] = other[int(expert[1])]
        return mine
    if not (rank := re.fullmatch(r"rank (\d+) of (\d+)", part)):
        return other
    axis = -1 if mine.dim() == 1 or re.search(r"(o|down)_proj", name) else -2
    mine, fused = mine.clone(), 2 if "gate_up" in name else 1
    for piece, old in zip(mine.chunk(fused, axis), other.chunk(fused, axis), strict=True):
        size, rest = divmod(piece.shape[axis], int(rank[2]))
        if rest or not size:
            raise CannotTryError(f"{name} cannot be divided among {rank[2]} ranks")
        piece.narrow(axis, int(rank[1]) * size, size).copy_(old.narrow(axis, int(rank[1]) * size, size))
    return mine


def _mapped(pattern: str, function: Callable[[torch.Tensor], torch.Tensor]) -> Edit:
    return lambda state, _: {
        name: function(value) if re.search(pattern, name) else value for name, value in state.items()
    }


def _skipped(state: State, config: Any, layer: int) -> State:
    """Make a layer add nothing: its output projections are 0."""
    outputs = rf"layers\.{layer}\..*(o_proj|down_proj|out_proj|c_proj)"
    return _mapped(outputs, torch.zeros_like)(state, config)


def _exchanged(state: State, config: Any, first: int, second: int) -> State:
    numbers = {str(first): second, str(second): first}
    renamed = {
        name: re.sub(r"(?<=\blayers\.)\d+(?=\.)", lambda found: str(numbers.get(found[0], found[0])), name)
        for name in state
    }
    return {renamed[name]: value for name, value in state.items()}


def _gate_and_up(state: State, config: Any) -> State:
    names = {"gate_proj": "up_proj", "up_proj": "gate_proj"}
    found = {}
    for name, value in state.items():
        if "gate_up_proj" in name:
            axis = -2 if value.dim() == 2 or value.shape[-1] == config.hidden_size else -1
            value = torch.cat(value.chunk(2, axis)[::-1], axis)
        found[re.sub(r"\b(gate|up)_proj\b", lambda match: names[match[0]], name)] = value
    return found


def _embeddings(state: State, config: Any, power: float) -> State:
    """Multiply the embeddings, but not a head that is tied to them, by a power of the hidden size."""
    factor = math.pow(config.hidden_size, power)
    return {name: value * factor if part_of(name) == "embeddings" else value for name, value in state.items()}


def _heads(config: Any) -> tuple[int, int, int]:
    """Return the numbers of heads and of key-value heads, and the size of a head."""
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return config.num_attention_heads, getattr(config, "num_key_value_heads", config.num_attention_heads), size


def _rotary_pairs(state: State, config: Any, is_inverse: bool) -> State:
    """Rotate neighbours instead of halves of a head, or load weights that are laid out for neighbours."""
    size = _heads(config)[2]
    order = torch.cat([torch.arange(0, size, 2), torch.arange(1, size, 2)])
    order = order.argsort() if is_inverse else order

    def moved(value: torch.Tensor) -> torch.Tensor:
        heads = value.reshape(-1, size, *value.shape[1:])
        return heads[:, order].reshape(value.shape)

    return _mapped(r"\.[qk]_(proj\.(weight|bias)|norm\.weight)$", moved)(state, config)


def _query_heads(state: State, config: Any, with_outputs: bool, layer: str) -> State:
    """Group the query heads as if those of one key-value head were not next to each other."""
    heads, groups, size = _heads(config)
    order = torch.arange(heads).reshape(groups, -1).T.flatten()
    rows = (order[:, None] * size + torch.arange(size)).flatten()
    found = _mapped(rf"layers\.{layer}\..*\.q_proj\.", lambda value: value[rows])(state, config)
    return _mapped(r"\.o_proj\.weight$", lambda value: value[:, rows])(found, config) if with_outputs else found


_EDITS: dict[str, Edit] = {
    "norms_plus_one": _mapped(_NORM, lambda value: value + 1),
    "norms_minus_one": _mapped(_NORM, lambda value: value - 1),
    "no_final_norm": _mapped(rf"^(?!.*layers\.).*{_NORM}", torch.ones_like),
    "no_qk_norm": _mapped(r"\.[qk]_norm\.weight$", torch.ones_like),
    "no_biases": _mapped(r"layers\..*_proj\.bias$", torch.zeros_like),
    "no_qkv_biases": _mapped(r"\.(q|k|v|qkv)_proj\.bias$", torch.zeros_like),
    "skipped": _skipped,
    "exchanged": _exchanged,
    "gate_and_up": _gate_and_up,
    "embeddings": _embeddings,
    "rotary_pairs": _rotary_pairs,
    "query_heads": _query_heads,
}

_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks|block)\.(\d+)\.")
_HEAD = re.compile(r"(?:^|\.)(?:lm_head|embed_out|output_layer)\.")
_EMBEDDINGS = re.compile(r"(?:^|\.)(?:embed_tokens|wte|word_embeddings|embed_in|tok_embeddings)\.")
# Layers and embeddings of an image or audio tower, which do not belong to the language model.
_TOWER = re.compile(r"(?:^|\.)(?:visual|vision\w*|audio\w*|image\w*)\.")


def part_of(name: str) -> str:
    """Return the part of the model that a tensor belongs to: lm_head, embeddings, layers.<number>, other."""
    if _TOWER.search(name):
        return "other"
    if layer := _LAYER.search(name):
        return f"layers.{int(layer.group(1))}"
    if _HEAD.search(name):
        return "lm_head"
    return "embeddings" if _EMBEDDINGS.search(name) else "other"
