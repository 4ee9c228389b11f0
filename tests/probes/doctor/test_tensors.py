"""Edits of tensors are what they are named for."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from foreshock.doctor.changes import CannotTryError, Change
from foreshock_probes.doctor.tensors import State, edited, quantised

CONFIG = SimpleNamespace(
    hidden_size=8, num_attention_heads=4, num_key_value_heads=2, head_dim=4, tie_word_embeddings=False
)


def _state(seed: int) -> State:
    random = torch.Generator().manual_seed(seed)
    shapes = {
        "self_attn.q_proj": (16, 8), "self_attn.o_proj": (8, 16), "mlp.gate_proj": (12, 8), "mlp.up_proj": (12, 8),
    }  # fmt: skip
    found: dict[str, tuple[int, ...]] = {
        f"model.layers.{n}.{name}.weight": shape for n in range(2) for name, shape in shapes.items()
    }
    found |= {
        "model.embed_tokens.weight": (24, 8),
        "model.norm.weight": (8,),
        "model.layers.0.mlp.experts.w": (2, 4, 4),
    }
    return {name: torch.randn(shape, generator=random) for name, shape in found.items()}


def _edited(state: State, **change: Any) -> State:
    return edited(dict(state), Change.of(**change), CONFIG, lambda _, like: {name: _state(2)[name] for name in like})


def _are_equal(one: State, other: State) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    "edits",
    [
        [("exchanged", 0, 1)] * 2, [("gate_and_up",)] * 2, [("rotary_pairs", False), ("rotary_pairs", True)],
        [("query_heads", True, r"\d+")] * 2, [("norms_plus_one",), ("norms_minus_one",)],
    ],
)  # fmt: skip
def test_an_edit_and_its_inverse_leave_the_weights(edits: list[tuple[Any, ...]]) -> None:
    first = _edited(_state(1), tensors=edits[0])
    assert not _are_equal(first, _state(1))
    second = _edited(first, tensors=edits[1])
    assert all(torch.allclose(second[name], value, atol=1e-6) for name, value in _state(1).items())


def test_the_pieces_of_all_ranks_or_experts_are_the_other_weights() -> None:
    for pieces in (["rank 0 of 2", "rank 1 of 2"], ["expert 0", "expert 1"]):
        held = _state(1)
        for piece in pieces:
            held = _edited(held, part=("other", piece))
        changed = [name for name, value in _state(1).items() if not torch.equal(held[name], value)]
        assert changed
        assert all(torch.equal(held[name], _state(2)[name]) for name in changed)
        assert all(("experts" in name) == (pieces[0] == "expert 0") for name in changed)
    with pytest.raises(CannotTryError, match="cannot be divided among 7 ranks"):
        _edited(_state(1), part=("other", "rank 0 of 7"))


def test_a_block_has_its_own_scale() -> None:
    wide = torch.cat([torch.ones(2, 128), torch.full((2, 128), 3e-4)], 1)
    assert torch.allclose(quantised(wide, "fp8_block"), wide, rtol=1e-6)
    assert not torch.allclose(quantised(wide, "fp8_tensor"), wide, rtol=1e-2)
