"""A batch composition contains every row once, and the variant `rebatched` groups rows differently."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreshock.scorers import NOISE_FLOOR_VARIANT, VARIANTS
from foreshock_probes.scorers.request import UnsupportedScoreError
from foreshock_probes.scorers.tokens import MOST_PADDING, compose


def test_rows_keep_their_order_and_fill_batches() -> None:
    plan = compose(np.array([3, 1, 2, 5, 4]), 2, "", padding="padded right")
    assert [batch.tolist() for batch in plan.batches] == [[0, 1], [2, 3], [4]]
    assert plan.name == "2 rows in order, padded right"


@given(
    lengths=st.lists(st.integers(0, 400), max_size=60), batch_size=st.integers(1, 50),
    batch_tokens=st.none() | st.integers(1, 2000), variant=st.sampled_from(VARIANTS), packed=st.booleans(),
)  # fmt: skip
def test_batches_in_order_keep_within_their_tokens(
    lengths: list[int], batch_size: int, batch_tokens: int | None, variant: str, packed: bool
) -> None:
    of_rows = np.array(lengths, dtype=np.int64)
    plan = compose(of_rows, batch_size, variant, "", batch_tokens, packed=packed)
    rows = [row for batch in plan.batches for row in batch.tolist()]
    assert sorted(rows) == list(range(len(lengths)))
    assert variant or rows == sorted(rows)
    for batch in plan.batches:
        tokens = int(of_rows[batch].sum() if packed else of_rows[batch].max() * batch.size)
        assert 0 < batch.size <= max(batch_size, 8 if variant else 1)
        assert batch.size == 1 or batch_tokens is None or tokens <= batch_tokens


def test_batch_without_padding_has_room_for_more_rows() -> None:
    lengths = np.array([10, 1, 1, 10])
    assert len(compose(lengths, 9, "", "", 22).batches) == 2
    assert len(compose(lengths, 9, "", "", 22, packed=True).batches) == 1
    assert len(compose(lengths, 9, "", "", 22, by_length=True).batches) == 2
    assert len(compose(lengths, 9, "", "", 22, by_length=True, packed=True).batches) == 1


def test_rebatched_sorts_by_length_and_takes_smaller_batches() -> None:
    plan = compose(np.array([3, 1, 2, 5, 4, 6, 7, 8]), 8, NOISE_FLOOR_VARIANT)
    assert [batch.tolist() for batch in plan.batches] == [[7, 6], [5, 3], [4, 0], [2, 1]]


def test_rebatched_groups_single_rows() -> None:
    assert len(compose(np.array([3, 1, 2]), 1, NOISE_FLOOR_VARIANT).batches) == 1


def test_unknown_variant_raises() -> None:
    with pytest.raises(UnsupportedScoreError, match="'shuffled'"):
        compose(np.array([1]), 1, "shuffled")


@given(
    lengths=st.lists(st.integers(0, 400), max_size=60),
    batch_size=st.integers(1, 50),
    batch_tokens=st.integers(1, 2000),
    variant=st.sampled_from(VARIANTS),
)
def test_batches_by_length_hold_every_row_once_within_their_bounds(
    lengths: list[int], batch_size: int, batch_tokens: int, variant: str
) -> None:
    of_rows = np.array(lengths, dtype=np.int64)
    plan = compose(of_rows, batch_size, variant, "", batch_tokens, by_length=True)
    rows = [row for batch in plan.batches for row in batch.tolist()]
    assert sorted(rows) == list(range(len(lengths)))
    plain = compose(of_rows, batch_size, "", "", batch_tokens, by_length=True)
    for batch in plain.batches:
        padded = int(of_rows[batch].max()) * batch.size
        assert batch.size <= batch_size
        assert batch.size == 1 or padded <= batch_tokens
        assert padded - int(of_rows[batch].sum()) <= MOST_PADDING * padded


def test_noise_floor_of_batches_by_length_has_other_neighbours_and_other_padding() -> None:
    lengths = np.arange(100, 108)
    plain, rebatched = (compose(lengths, 128, variant, "", 10_000, by_length=True) for variant in VARIANTS)
    assert [batch.tolist() for batch in plain.batches] == [[7, 6, 5, 4, 3, 2, 1, 0]]
    assert [batch.tolist() for batch in rebatched.batches] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert plain.name != rebatched.name


def test_noise_floor_groups_rows_that_each_fill_a_batch() -> None:
    lengths = np.array([10, 100, 1000])
    assert len(compose(lengths, 128, "", "", 5000, by_length=True).batches) == 3
    assert len(compose(lengths, 128, NOISE_FLOOR_VARIANT, "", 5000, by_length=True).batches) == 1
