"""Moments: two-pass values for any split, also if the means are far larger than the deviations."""

from __future__ import annotations

from functools import reduce

import numpy as np
import pytest

from foreshock.measures.statistics.moments import Moments


def moments_of(values: np.ndarray) -> Moments:
    """Return the moments of values [N, 2], each value a part of its own."""
    return Moments.of_parts(np.ones(values.shape[0], np.int64), values, np.zeros((values.shape[0], 2, 2)))


@pytest.mark.parametrize("offset", [0.0, 1.0, 1e6])
@pytest.mark.parametrize("parts", [1, 2, 7, 300])
def test_moments_of_parts_equal_those_of_all_values(offset: float, parts: int) -> None:
    values = offset + np.random.default_rng(parts).normal(size=(300, 2))
    found = reduce(Moments.merge, map(moments_of, np.array_split(values, parts)), moments_of(values[:0]))
    deviations = values - values.mean(axis=0)
    assert found.count == 300
    np.testing.assert_allclose(found.means, values.mean(axis=0), rtol=1e-13)
    np.testing.assert_allclose(found.products, deviations.T @ deviations, rtol=1e-13 * (1.0 + offset))
    again = Moments.from_array(found.count, found.to_array(), 2)
    np.testing.assert_array_equal(again.products, found.products)
