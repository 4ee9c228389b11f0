"""Compensated sums are as accurate as exact sums in float64."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreshock.measures.statistics.compensated_sums import (
    CompensatedSums,
    summable_parts,
    sums_by_bucket,
    sums_by_run,
    two_product,
    two_sum,
)

reasonable = st.floats(-1e150, 1e150, allow_nan=False).filter(lambda value: value == 0 or abs(value) > 1e-150)


@settings(deadline=None)
@given(st.lists(reasonable, min_size=1, max_size=60))
def test_sum_equals_the_exact_sum(values: list[float]) -> None:
    found = float(CompensatedSums.over_first_axis(np.array(values)).value)
    scale = math.fsum(abs(value) for value in values)
    assert found == pytest.approx(math.fsum(values), rel=1e-15, abs=scale * 1e-29)


@settings(deadline=None)
@given(st.lists(reasonable, min_size=1, max_size=60), st.integers(0, 60), st.randoms(use_true_random=False))
def test_parts_in_any_order_sum_to_the_same(values: list[float], cut: int, order: object) -> None:
    order.shuffle(values)  # type: ignore[attr-defined]
    parts = CompensatedSums.over_first_axis(np.array(values[:cut])) + CompensatedSums.over_first_axis(
        np.array(values[cut:])
    )
    scale = math.fsum(abs(value) for value in values)
    assert float(parts.value) == pytest.approx(math.fsum(values), rel=1e-15, abs=scale * 1e-29)


def test_cancelling_terms_keep_their_digits() -> None:
    values = np.array([1e16, 1.0, -1e16, 1.0])
    assert float(CompensatedSums.over_first_axis(values).value) == 2.0
    assert float(np.cumsum(values)[-1]) != 2.0


@settings(deadline=None)
@given(reasonable, reasonable)
def test_two_sum_is_exact(a: float, b: float) -> None:
    total, lost = two_sum(np.array(a), np.array(b))
    assert Fraction(float(total)) + Fraction(float(lost)) == Fraction(a) + Fraction(b)


@settings(deadline=None)
@given(st.floats(-1e60, 1e60), st.floats(1e-60, 1e60))
def test_two_product_is_exact(a: float, b: float) -> None:
    if a and abs(a) < 1e-60:
        a = 1.0
    total, lost = two_product(np.array(a), np.array(b))
    assert Fraction(float(total)) + Fraction(float(lost)) == Fraction(a) * Fraction(b)


def test_infinite_term_makes_the_sum_infinite_and_not_nan() -> None:
    sums = CompensatedSums.over_first_axis(np.array([[1.0, 2.0], [math.inf, 2.0], [math.inf, 2.0]]))
    assert (sums + sums).value.tolist() == [math.inf, 12.0]


def test_sum_of_nothing_is_zero() -> None:
    assert CompensatedSums.over_first_axis(np.zeros((0, 3))).value.tolist() == [0.0] * 3


@settings(deadline=None)
@given(
    st.lists(st.floats(-1e100, 1e100), min_size=1, max_size=200),
    st.integers(1, 5),
    st.integers(0, 10_000),
)
def test_sums_by_bucket_and_by_run_equal_exact_sums(values: list[float], size: int, seed: int) -> None:
    array = np.array(values)
    high, low = summable_parts(array)
    for value, of_high, of_low in zip(values, high.tolist(), low.tolist(), strict=True):
        assert Fraction(of_high) + Fraction(of_low) == Fraction(value)
    assert Fraction(float(high.sum())) == sum(map(Fraction, high.tolist())), "high parts add up exactly"
    cells = np.random.default_rng(seed).integers(0, size, array.size)
    starts = np.unique(np.concatenate([[0], np.random.default_rng(seed).integers(0, array.size, size)]))
    members = [array[cells == cell] for cell in range(size)]
    of_cells = CompensatedSums.of_columns([sums_by_bucket(cells, (high, low), size)])
    of_runs = CompensatedSums.of_columns([sums_by_run(starts, (high, low))])
    largest = float(np.abs(array).max())
    for found, parts in ((of_cells, members), (of_runs, np.split(array, starts[1:]))):
        for index, part in enumerate(parts):
            error = Fraction(float(found.high[index, 0])) + Fraction(float(found.low[index, 0]))
            error -= sum(map(Fraction, part.tolist()))
            scale = math.fsum(abs(value) for value in part.tolist())
            # The low parts are summed without compensation: they are at most about n · 2^-52 of the largest value.
            assert abs(error) <= Fraction(min(scale * 1e-13, largest * 1e-27)) + Fraction(scale) / 2**104


@pytest.mark.parametrize("odd", [[math.inf, 1.0], [-math.inf, 1.0], [1.7e308, 1.7e308, -1.7e308]])
def test_values_too_large_to_split_are_summed_plainly(odd: list[float]) -> None:
    high, low = summable_parts(np.array(odd))
    assert not high.any()
    assert low.tolist() == odd


def test_empty_array_has_empty_parts() -> None:
    high, low = summable_parts(np.zeros(0))
    assert high.size == low.size == 0


def test_one_sum_is_read_as_all_of_them() -> None:
    high, low = np.array([[1e16, -2.5], [math.inf, 0.0]]), np.array([[1.0, 1e-20], [0.0, -0.0]])
    sums = CompensatedSums.of_columns([(high[:, 0], low[:, 0]), (high[:, 1], low[:, 1])])
    assert [[sums.at((row, column)) for column in range(2)] for row in range(2)] == sums.value.tolist()
    np.testing.assert_array_equal(sums.to_array(), np.stack([sums.high, sums.low]))
    first = CompensatedSums(sums.high[0], sums.low[0])
    for index in range(2):
        assert Fraction(*first.exact_ratio(index)) == Fraction(first.high[index]) + Fraction(first.low[index])
