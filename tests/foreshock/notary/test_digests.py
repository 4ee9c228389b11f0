"""Digests of tensors: a whole has the digest that its parts give, and any bit, place or dtype changes it."""

import pytest
import torch

from foreshock.notary.compare import Holding
from foreshock.notary.digests import Part, pieces_of, tensors_of
from foreshock.notary.pieces import whole_of
from tests.foreshock.notary.faults import announced, held, weights_of


def values_of(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Return random weights."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.int8])
def test_parts_by_rows_and_by_columns_give_the_digest_of_the_whole(dtype: torch.dtype) -> None:
    values = (10 * values_of(12, 16, dtype=torch.float32)).to(dtype)
    whole = Holding(tensors_of({"w": values})).wholes
    rows = [Part("w", part, row=4 * number) for number, part in enumerate(values.chunk(3))]
    columns = [Part("w", part, column=8 * number) for number, part in enumerate(values.chunk(2, dim=1))]
    assert Holding(pieces_of(rows)).wholes == Holding(pieces_of(columns)).wholes == whole


def test_each_bit_and_each_place_counts() -> None:
    values = values_of(6, 10)
    found = {whole_of(tensors_of({"w": values})["w"])}
    for row in range(6):
        for column in range(10):
            for bit in range(16):
                bits = values.view(torch.int16).clone()
                bits[row, column] ^= -(1 << 15) if bit == 15 else 1 << bit
                found.add(whole_of(tensors_of({"w": bits.view(torch.bfloat16)})["w"]))
    assert len(found) == 1 + 6 * 10 * 16
    for changed in (values.flip(0), values.flip(1), -values, values[[1, 0, 2, 3, 4, 5]], values.float()):
        assert whole_of(tensors_of({"w": changed})["w"]) not in found


def test_large_tables_are_digested_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"w": values_of(64, 6), "stack": values_of(5, 4, 3), "bias": values_of(7), "empty": values_of(0, 4)}
    expected = tensors_of(values)
    monkeypatch.setattr("foreshock.notary.digests._WORDS_AT_ONCE", 8)
    assert tensors_of(values) == expected


def test_digest_is_that_of_the_dtype_that_is_delivered() -> None:
    values = values_of(4, 4, dtype=torch.float32)
    assert tensors_of({"w": values}, torch.bfloat16) == tensors_of({"w": values.bfloat16()})
    counts = {"count": torch.tensor([3])}
    assert tensors_of(counts, torch.bfloat16) == tensors_of(counts)


def test_slices_that_begin_within_a_word_are_digested_and_columns_are_not() -> None:
    values = values_of(5, 3)
    sliced = tensors_of({"w": torch.cat([values[:1], values])[1:]})
    assert sliced == tensors_of({"w": values})
    with pytest.raises(ValueError, match="within a word"):
        pieces_of([Part("w", values, column=1)])


@pytest.mark.parametrize("shards", [1, 2])
def test_engine_that_fuses_shards_and_pads_holds_what_was_announced(shards: int) -> None:
    weights = weights_of(3)
    assert held(weights, shards).wholes == announced(weights).wholes


def test_fsdp_shard_is_a_piece_at_its_place() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    values, pieces = values_of(8, 6), []
    for rank in range(4):
        torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=4)
        try:
            mesh = init_device_mesh("cpu", (4,))
            local = DTensor.from_local(values.chunk(4)[rank], mesh, [Shard(0)])
            pieces += tensors_of({"w": local}, rank=rank)["w"]
        finally:
            torch.distributed.destroy_process_group()
    assert len(pieces) == 4
    assert whole_of(pieces) == whole_of(tensors_of({"w": values})["w"])
