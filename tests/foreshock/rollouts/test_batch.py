"""Batches of rollouts in memory: construction and selection."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from foreshock.errors import InvalidRolloutsError
from foreshock.rollouts import RolloutBatch
from foreshock.rollouts.sampling import select_rollouts
from tests.foreshock.batches import random_batch


def test_lists_of_tensors_are_accepted() -> None:
    """Frameworks without padding hold such lists, in bfloat16 or as part of a graph."""
    rows: list[Any] = [torch.tensor([-0.5, -1.25]).bfloat16(), torch.tensor([-3.0]).requires_grad_()]
    ids: list[Any] = [torch.tensor([1, 2]), [3]]
    batch = RolloutBatch.from_lists(["a", "b"], [[1], [1]], ids, rollout_log_probs=rows)
    assert batch.rollout_log_probs is not None
    assert batch.rollout_log_probs.tolist() == [-0.5, -1.25, -3.0]
    flat = torch.tensor([-0.5, -1.25, -3.0], requires_grad=True).bfloat16()
    alike = RolloutBatch.from_arrays(["a", "b"], [1, 1], [0, 1, 2], [1, 2, 3], [0, 2, 3], rollout_log_probs=flat)
    np.testing.assert_array_equal(alike.rollout_log_probs, batch.rollout_log_probs)


def test_whole_numbers_are_accepted_as_names() -> None:
    ids: dict[str, Any] = {"prompt_token_ids": [[1], [1]], "response_token_ids": [[1, 2], [3]]}
    named = RolloutBatch.from_lists(["0", "1"], **ids, group_ids=["5", None])
    numbered = RolloutBatch.from_lists(range(2), **ids, group_ids=np.array([5, None], object))
    assert (numbered.sample_ids, numbered.group_ids) == (named.sample_ids, named.group_ids)
    for wrong in ([1.5, None], [True, None], [["a"], None]):
        with pytest.raises(InvalidRolloutsError, match="must be a string, not") as raised:
            RolloutBatch.from_lists(range(2), **ids, group_ids=wrong)
        assert (raised.value.row, raised.value.column) == (0, "group_id")
    with pytest.raises(InvalidRolloutsError, match="row 1, column `group_id`: cannot be encoded as UTF-8"):
        RolloutBatch.from_lists(range(2), **ids, group_ids=["é", "\ud800"])


@pytest.mark.parametrize(
    ("values", "fits"),
    [
        ([0, 2**31 - 1], True),
        ([0, 2**31], False),
        (np.array([0, 2**63], np.uint64), False),
        (np.array([True, False]), True),
    ],
)
def test_whole_numbers_keep_their_value_or_are_refused(values: Any, fits: bool) -> None:
    given = np.asarray(values)
    arguments: tuple[Any, ...] = (["a"], [], [0, 0], given, [0, 2])
    if fits:
        kept = RolloutBatch.from_arrays(*arguments).response_token_ids
        assert kept.dtype == np.int32
        np.testing.assert_array_equal(kept, given)
        return
    with pytest.raises(InvalidRolloutsError) as raised:
        RolloutBatch.from_arrays(*arguments)
    assert raised.value.column == "response_token_ids"


@pytest.mark.parametrize(
    ("columns", "row", "column"),
    [
        ({"rollout_log_probs": [[-1.0, -2.0], None]}, 1, "rollout_log_probs"),
        ({"response_token_ids": [[1, 2], 3]}, 1, "response_token_ids"),
        ({"prompt_token_ids": [None, [1]]}, 0, "prompt_token_ids"),
    ],
)
def test_row_that_is_not_a_list_is_named(columns: dict[str, Any], row: int, column: str) -> None:
    rows: dict[str, Any] = {"prompt_token_ids": [[1], [1]], "response_token_ids": [[1, 2], [3]]} | columns
    with pytest.raises(InvalidRolloutsError, match="must be a list") as raised:
        RolloutBatch.from_lists(["a", "b"], **rows)
    assert (raised.value.row, raised.value.column) == (row, column)


def test_select_indexes_like_numpy() -> None:
    batch = random_batch(0, 4)
    assert batch.select([]).num_rollouts == 0
    assert batch.select([2, -1]).sample_ids == ["sample-0-2", "sample-0-3"]
    assert batch.select([True, False, False, True]).sample_ids == ["sample-0-0", "sample-0-3"]
    for wrong in ([4], [True, False], [0.5]):
        with pytest.raises(IndexError):
            batch.select(wrong)


@given(
    lengths=st.lists(st.integers(0, 5_000), min_size=1, max_size=300),
    most=st.one_of(st.none(), st.integers(1, 400)),
    seed=st.one_of(st.none(), st.text(max_size=5)),
)
def test_a_sample_is_the_same_each_time_and_spread(lengths: list[int], most: int | None, seed: str | None) -> None:
    ids = [f"sample-{number}" for number in range(len(lengths))]
    array = np.array(lengths, dtype=np.int64)
    chosen = select_rollouts(ids, array, most, seed)
    size = len(lengths) if most is None else min(most, len(lengths))
    assert chosen.size == size
    assert np.array_equal(chosen, np.unique(chosen))
    assert np.array_equal(chosen, select_rollouts(ids, array, most, seed))
    # In any part of the sorted lengths there are as many as belong there, give or take one.
    ranks = np.sort(np.searchsorted(np.sort(array), array[chosen], side="right"))
    expected = (np.arange(size) + 1) * len(lengths) / size
    assert (ranks >= expected - len(lengths) / size - 1).all()


def test_over_seeds_every_rollout_has_the_same_chance() -> None:
    lengths = np.random.default_rng(0).integers(1, 50, 30)
    ids = [f"sample-{number}" for number in range(30)]
    seeds = 1_000
    counts = np.zeros(30)
    for seed in range(seeds):
        counts[select_rollouts(ids, lengths, 7, f"run/{seed}")] += 1
    expected = seeds * 7 / 30
    # Six standard deviations of a binomial count.
    assert np.abs(counts - expected).max() < 6 * np.sqrt(expected * (1 - 7 / 30))
