"""Changes of logged values that need no parameter."""

import numpy as np
import pytest

from foreshock.doctor.data import DATA_CHANGES
from foreshock.doctor.evidence import Compared
from foreshock.rollouts import RolloutBatch


def exchanged(lengths: list[int]) -> tuple[Compared, np.ndarray, np.ndarray]:
    """Return log-probs of rows in another order: what is logged, the replay, and what is logged again."""
    random = np.random.default_rng(3)
    rows = [-random.exponential(1.0, length) for length in lengths]
    order = np.arange(len(lengths))
    for length in set(lengths):
        same = [row for row, each in enumerate(lengths) if each == length]
        order[same] = np.roll(same, 1)
    logged = np.concatenate([rows[row] for row in order])
    names, ids = [str(row) for row in range(len(lengths))], [[2] * length for length in lengths]
    batch = RolloutBatch.from_lists(names, [[1]] * len(lengths), ids)
    return Compared.of(batch, logged.astype(np.float32)), np.concatenate(rows), logged


@pytest.mark.parametrize(("short", "is_whole"), [([1, 1, 2, 2], True), ([1, 1, 2, 2] * 8, False)])
def test_rows_in_another_order_are_found_short_ones_only_among_longer_ones(short: list[int], is_whole: bool) -> None:
    compared, replay, logged = exchanged([20] * 10 + short)
    found = DATA_CHANGES["permuted"](compared, replay)
    assert found is not None
    assert found[:200] == pytest.approx(logged[:200])
    assert np.allclose(found[200:], logged[200:]) == is_whole
