"""A batch composition contains every row once, and the variant `rebatched` groups rows differently."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreshock.scorers import NOISE_FLOOR_VARIANT, VARIANTS
from probes.scorers.composition import compose
from probes.scorers.request import UnsupportedScoreError


@given(
    lengths=st.lists(st.integers(1, 50), max_size=40),
    batch_size=st.integers(1, 50),
    variant=st.sampled_from(VARIANTS),
)
def test_every_row_is_in_one_batch(lengths: list[int], batch_size: int, variant: str) -> None:
    plan = compose(np.array(lengths, dtype=np.int64), batch_size, variant)
    rows = [row for batch in plan.batches for row in batch.tolist()]
    assert sorted(rows) == list(range(len(lengths)))
    assert all(batch.size > 0 for batch in plan.batches)


def test_rows_keep_their_order_and_fill_batches() -> None:
    plan = compose(np.array([3, 1, 2, 5, 4]), 2, "", padding="padded right")
    assert [batch.tolist() for batch in plan.batches] == [[0, 1], [2, 3], [4]]
    assert plan.name == "2 rows in order, padded right"


def test_rebatched_sorts_by_length_and_takes_smaller_batches() -> None:
    plan = compose(np.array([3, 1, 2, 5, 4, 6, 7, 8]), 8, NOISE_FLOOR_VARIANT)
    assert [batch.tolist() for batch in plan.batches] == [[7, 6], [5, 3], [4, 0], [2, 1]]


def test_rebatched_groups_single_rows() -> None:
    assert len(compose(np.array([3, 1, 2]), 1, NOISE_FLOOR_VARIANT).batches) == 1


def test_unknown_variant_raises() -> None:
    with pytest.raises(UnsupportedScoreError, match="'shuffled'"):
        compose(np.array([1]), 1, "shuffled")
