"""Compensated sums lose nothing that a float64 could show."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreshock.measures.sums import CompensatedSums, two_product, two_sum

reasonable = st.floats(-1e150, 1e150, allow_nan=False).filter(lambda value: value == 0 or abs(value) > 1e-150)


@settings(deadline=None)
@given(st.lists(reasonable, min_size=1, max_size=60))
def test_a_sum_is_as_good_as_an_exact_one(values: list[float]) -> None:
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


def test_what_plain_summing_loses_is_kept() -> None:
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


def test_an_infinite_term_makes_the_sum_infinite_and_not_nan() -> None:
    sums = CompensatedSums.over_first_axis(np.array([[1.0, 2.0], [math.inf, 2.0], [math.inf, 2.0]]))
    assert (sums + sums).value.tolist() == [math.inf, 12.0]


def test_the_sum_of_nothing_is_zero() -> None:
    assert CompensatedSums.over_first_axis(np.zeros((0, 3))).value.tolist() == [0.0] * 3
