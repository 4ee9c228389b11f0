"""Padded arrays of any padding side and framework give the same batch as flat arrays."""

import dataclasses
import tracemalloc
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from foreshock.errors import InvalidRolloutsError
from foreshock.measures import measure_step
from foreshock.rollouts import RolloutBatch
from tests.foreshock.batches import assert_equal_fields, random_batch

OF_TOKENS = ("rollout_log_probs", "trainer_log_probs", "entropy", "turn", "weights_version", "advantage")
OF_ROLLOUTS = (
    "group_ids", "data_sources", "engine_ids", "reward", "finish_reasons", "temperature", "top_p", "top_k", "min_p",
)  # fmt: skip


def cells(batch: RolloutBatch, kind: str, seed: int) -> NDArray[np.bool_]:
    """Return True for the cells of the tokens of a batch, [N, L]."""
    random = np.random.default_rng(seed)
    lengths = batch.response_lengths
    width = int(lengths.max()) + 5
    places = np.arange(width)
    if kind == "right":
        return np.asarray(places < lengths[:, None])
    if kind == "left":
        return np.asarray(places >= width - lengths[:, None])
    if kind == "middle":
        first = random.integers(0, width - lengths + 1)[:, None]
        return np.asarray((places >= first) & (places < first + lengths[:, None]))
    inside = np.zeros((lengths.size, width), np.bool_)
    for row, length in enumerate(lengths.tolist()):
        inside[row, random.choice(width, length, replace=False)] = True
    return inside


def padded(values: NDArray[Any], inside: NDArray[np.bool_]) -> NDArray[Any]:
    """Return an array with the flat values in these cells, and invalid values in the padding."""
    garbage = np.array(1e30, values.dtype) if values.dtype.kind == "f" else np.array(-100, np.int64)
    whole = np.full(inside.shape, garbage)
    whole[inside] = values
    return whole


def padded_columns(batch: RolloutBatch, inside: NDArray[np.bool_]) -> dict[str, Any]:
    columns = {name: padded(getattr(batch, name), inside) for name in OF_TOKENS}
    return columns | {name: getattr(batch, name) for name in OF_ROLLOUTS}


def mask_in(batch: RolloutBatch, inside: NDArray[np.bool_]) -> NDArray[np.int64]:
    mask = np.zeros(inside.shape, np.int64)
    mask[inside] = batch.generated
    return mask


def assert_same(one: RolloutBatch, two: RolloutBatch) -> None:
    """Assert that all fields and all measures are bit for bit equal."""
    assert_equal_fields(one, two)
    first, second = measure_step(one), measure_step(two)
    assert first.step.to_bytes() == second.step.to_bytes()
    of_one, of_two = (step.comparisons["trainer/rollout"] for step in (first, second))
    assert of_one.statistics.to_bytes() == of_two.statistics.to_bytes()
    assert of_one.summaries.table.equals(of_two.summaries.table)


def from_first_to_last_sampled(batch: RolloutBatch) -> RolloutBatch:
    """Return the batch without tool output at the start or end of its responses."""
    keep = np.zeros(batch.num_tokens, np.bool_)
    lengths = []
    for start, stop in zip(batch.response_offsets[:-1], batch.response_offsets[1:], strict=True):
        sampled = [place for place in range(start, stop) if batch.generated[place]]
        lengths.append(sampled[-1] + 1 - sampled[0] if sampled else 0)
        if sampled:
            keep[sampled[0] : sampled[-1] + 1] = True
    columns = {name: getattr(batch, name)[keep] for name in (*OF_TOKENS, "response_token_ids", "response_mask")}
    return dataclasses.replace(batch, response_offsets=np.concatenate([[0], np.cumsum(lengths)]), **columns)


@settings(deadline=None, max_examples=25)
@given(
    seed=st.integers(0, 10_000),
    rollouts=st.integers(1, 12),
    kind=st.sampled_from(["right", "left", "middle", "scattered"]),
    tensors=st.booleans(),
)
def test_padded_arrays_give_same_batch_as_flat_ones(seed: int, rollouts: int, kind: str, tensors: bool) -> None:
    batch = random_batch(seed, rollouts, 20)
    inside = cells(batch, kind, seed)
    prompts = np.ones((rollouts, 5), np.int64)
    hand = torch.from_numpy if tensors else np.asarray
    columns = padded_columns(batch, inside)
    columns |= {name: hand(columns[name]) for name in OF_TOKENS}
    found = RolloutBatch.from_padded(
        hand(padded(batch.response_token_ids, inside)),
        hand(mask_in(batch, inside)),
        response_padding_mask=hand(inside),
        prompt_token_ids=hand(batch.prompt_token_ids.reshape(rollouts, 5)),
        prompt_padding_mask=hand(prompts),
        sample_ids=batch.sample_ids,
        attributes=batch.attributes,
        **columns,
    )
    assert_same(found, batch)


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 10_000), kind=st.sampled_from(["right", "left", "middle"]))
def test_response_mask_alone_gives_start_and_end_of_response(seed: int, kind: str) -> None:
    whole = random_batch(seed, 8, 20)
    inside = cells(whole, kind, seed)
    found = RolloutBatch.from_padded(
        padded(whole.response_token_ids, inside), mask_in(whole, inside) == 1,
        prompt_token_ids=whole.prompt_token_ids.reshape(8, 5), prompt_padding_mask=np.ones((8, 5)),
        sample_ids=whole.sample_ids, attributes=whole.attributes, **padded_columns(whole, inside),
    )  # fmt: skip
    assert_same(found, from_first_to_last_sampled(whole))


def test_sample_ids_default_to_row_numbers_and_groups_may_be_numbers() -> None:
    mask = np.array([[1, 1, 0], [0, 0, 0], [0, 1, 1]])
    for groups in ([7, 7, 8], np.array([7, 7, 8]), torch.tensor([7, 7, 8]), np.array(["7", "7", "8"], object)):
        batch = RolloutBatch.from_padded(mask, mask, group_ids=groups)
        assert batch.sample_ids == ["0", "1", "2"]
        assert batch.group_ids == ["7", "7", "8"]
        assert batch.response_lengths.tolist() == [2, 0, 2]
        assert batch.prompt_token_ids.size == 0


def test_one_value_per_rollout_is_repeated_for_its_tokens() -> None:
    mask = np.array([[1, 1, 0], [0, 1, 1], [0, 1, 0]])
    once = RolloutBatch.from_padded(mask, mask, weights_version=[4, 5, 6], turn=[0, 1, 2], advantage=[1.0, -1.0, 0.5])
    assert np.asarray(once.weights_version).tolist() == [4, 4, 5, 5, 6]
    assert np.asarray(once.turn).tolist() == [0, 0, 1, 1, 2]
    assert not once.advantage_per_token
    square = RolloutBatch.from_padded([[1]], [[1]], advantage=[2.0])
    assert not square.advantage_per_token
    assert RolloutBatch.from_padded([[1]], [[1]], advantage=[[2.0]]).advantage_per_token


def test_tensors_of_any_dtype_give_same_values() -> None:
    mask = torch.tensor([[1, 1, 0], [0, 1, 1]])
    exact = torch.tensor([[-0.5, -1.25, 9.0], [9.0, -3.0, -0.0078125]])
    wanted = np.array([-0.5, -1.25, -3.0, -0.0078125], np.float32)
    for tensor in (exact.bfloat16(), exact.half(), exact.double(), exact.clone().requires_grad_(), exact.T.clone().T):
        batch = RolloutBatch.from_padded(mask, mask.to(tensor.dtype), rollout_log_probs=tensor)
        assert batch.rollout_log_probs is not None
        assert batch.rollout_log_probs.dtype == np.float32
        np.testing.assert_array_equal(batch.rollout_log_probs, wanted)


ONES = np.ones((2, 3))
TWO_TOKENS = np.array([[1, 1, 0], [0, 1, 1]])


@pytest.mark.parametrize(
    ("arguments", "row", "column", "words"),
    [
        ({"response_mask": [[1, 1, 0], [0, 2, 1]]}, 1, "response_mask", "2 at place 1: a mask holds 0 and 1"),
        ({"response_mask": [[1, np.nan, 0], [0, 1, 1]]}, 0, "response_mask", "nan at place 1"),
        ({"response_mask": [1, 1, 1]}, None, "response_mask", r"\(3,\)"),
        ({"response_mask": None}, None, "response_mask", "shape"),
        ({"response_token_ids": ONES[:, :2]}, None, "response_token_ids", r"\(2, 2\) and must have \(2, 3\)"),
        ({"response_padding_mask": ONES[:1]}, None, "response_padding_mask", r"\(1, 3\) and must have \(2, 3\)"),
        ({"response_padding_mask": [[1, 1, 0], [1, 1, 0]]}, 1, "response_mask", "at place 2: the model sampled"),
        ({"rollout_log_probs": -ONES[0]}, None, "rollout_log_probs", r"\(3,\) and must have \(2, 3\)"),
        ({"rollout_log_probs": [[-1, 0.7, 5], [5, 0.6, 0.5]]}, 0, "rollout_log_probs", "at token 1 is above 0"),
        ({"weights_version": [1, 2, 3]}, None, "weights_version", r"must have \(2, 3\) or \(2,\)"),
        ({"advantage": [1.0, 2.0, 3.0]}, None, "advantage", "must have 2: one per rollout"),
        ({"group_ids": ["a"]}, None, "group_id", "must have 2"),
        ({"sample_ids": ["a", "a"]}, 1, "sample_id", "row 0 too"),
        ({"prompt_token_ids": ONES}, None, "prompt_padding_mask", "shape"),
        ({"rollout_log_probs": torch.ones(2, 3, device="meta")}, None, "rollout_log_probs", "not an array"),
        ({"rollout_log_probs": [["a"] * 3] * 2}, None, "rollout_log_probs", "must hold float32"),
        ({"rollout_logprobs": -ONES}, None, "rollout_logprobs", "unknown field"),
        ({"response_mask": np.ones((0, 3)), "response_token_ids": np.ones((0, 3))}, None, "sample_id", "no rows"),
    ],
)
def test_invalid_column_is_named(arguments: dict[str, Any], row: int | None, column: str, words: str) -> None:
    given = {"response_token_ids": TWO_TOKENS, "response_mask": TWO_TOKENS} | arguments
    with pytest.raises(InvalidRolloutsError, match=words) as raised:
        RolloutBatch.from_padded(given.pop("response_token_ids"), given.pop("response_mask"), **given)
    assert (raised.value.row, raised.value.column) == (row, column)


@pytest.mark.parametrize("holes", [False, True])
def test_from_padded_takes_less_memory_than_its_arrays(holes: bool) -> None:
    rows, width = 64, 8192
    inside = np.arange(width) < np.linspace(1, width, rows)[:, None]
    if holes:
        inside[:, 1::7] = False
    ids, log_probs = np.ones((rows, width), np.int64), -np.ones((rows, width), np.float32)
    columns: dict[str, Any] = {"rollout_log_probs": log_probs, "trainer_log_probs": log_probs, "entropy": -log_probs}
    size = inside.nbytes + ids.nbytes + 3 * log_probs.nbytes
    tracemalloc.start()
    try:
        RolloutBatch.from_padded(ids, inside, response_padding_mask=inside, **columns)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < size
