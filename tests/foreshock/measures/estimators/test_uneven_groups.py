"""The effective number of groups, and the upper end from the spread of groups."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreshock.measures.estimators.bootstrap import (
    LEAST_CLUSTERS,
    bootstrap_intervals,
    effective_number,
    high_from_spread,
    nonnegative_intervals,
)
from foreshock.measures.estimators.intervals import clustered_interval, student_t_quantile


def of_groups(sums: list[float]) -> float:
    values = np.array(sums)
    return effective_number(float(values.sum()), float(np.square(values).sum()))


def test_effective_number_counts_groups_that_contribute_the_same() -> None:
    assert of_groups([3.0] * 8) == pytest.approx(8.0)
    assert of_groups([3.0] * 5 + [0.0] * 3) == pytest.approx(5.0)
    assert of_groups([1.0] + [1e-9] * 7) == pytest.approx(1.0)


@given(st.lists(st.floats(0.0, 1e6), min_size=1, max_size=50))
def test_effective_number_is_at_most_the_number_of_groups(sums: list[float]) -> None:
    found = of_groups(sums)
    assert math.isnan(found) or 1.0 - 1e-9 <= found <= len(sums) + 1e-9


def test_effective_number_without_contributions_is_nan() -> None:
    assert math.isnan(of_groups([0.0] * 8))
    assert math.isnan(effective_number(math.inf, math.inf))
    assert math.isnan(effective_number(math.nan, 1.0))


def test_high_end_is_coxs_for_log_normal_groups_of_equal_size() -> None:
    random = np.random.default_rng(3)
    means = random.lognormal(0.0, 1.0, 8)
    variance = float(np.log(means).var(ddof=1))
    error = math.sqrt(variance / 8 + variance**2 / 14)
    clustered = float(means.std(ddof=1)) / math.sqrt(8) / float(means.mean())
    assert error > clustered
    (found,) = high_from_spread(means[:, None] * 100, np.full(8, 100.0))
    assert found == pytest.approx(means.mean() * math.exp(student_t_quantile(0.975, 7) * error))


def test_high_end_of_many_even_groups_is_students() -> None:
    random = np.random.default_rng(4)
    sums = random.normal(1.0, 0.1, 2000) * 100
    exact = clustered_interval(sums, np.full(2000, 100))
    (found,) = high_from_spread(sums[:, None], np.full(2000, 100.0))
    assert found - exact.mean == pytest.approx(exact.high - exact.mean, rel=0.05)


@settings(max_examples=50)
@given(seed=st.integers(0, 2**20), scale=st.floats(1e-12, 1e6))
def test_common_factor_scales_the_high_end(seed: int, scale: float) -> None:
    random = np.random.default_rng(seed)
    tokens = random.integers(1, 100, 9).astype(np.float64)
    sums = random.lognormal(0.0, 2.0, (9, 1)) * tokens[:, None]
    assert high_from_spread(sums * scale, tokens) == pytest.approx(high_from_spread(sums, tokens) * scale)


def test_group_without_mismatch_leaves_the_end_finite() -> None:
    sums = np.array([[0.0], [1.0], [2.0], [1.5], [0.5], [1.0]])
    (found,) = high_from_spread(sums, np.full(6, 10.0))
    assert found > sums.sum() / 60.0
    assert np.isnan(high_from_spread(np.zeros((6, 1)), np.full(6, 10.0))).all()
    assert np.isnan(high_from_spread(np.ones((1, 1)), np.ones(1))).all()


def test_reported_interval_contains_the_bootstrap_t_and_is_never_negative() -> None:
    random = np.random.default_rng(5)
    tokens = random.integers(5, 50, 40)
    groups = np.repeat(np.arange(8), 5)
    sums = (random.lognormal(0.0, 1.5, 8)[groups] * tokens)[:, None] * random.lognormal(0.0, 0.5, (40, 3))
    for narrow, wide in zip(
        bootstrap_intervals(sums, tokens, groups), nonnegative_intervals(sums, tokens, groups), strict=True
    ):
        assert wide.low == max(narrow.low, 0.0)
        assert wide.high >= narrow.high
        assert (wide.mean, wide.clusters) == (narrow.mean, 8)
    few = nonnegative_intervals(sums[:4], tokens[:4])[0]
    assert LEAST_CLUSTERS > 4
    assert math.isnan(few.low)
    assert math.isnan(few.high)


def test_reported_interval_covers_the_mean_of_eight_uneven_groups() -> None:
    random = np.random.default_rng(6)
    tokens = np.full(8, 100)
    truth = math.exp(1.6**2 / 2)
    held = {"bootstrap": 0, "reported": 0}
    for _ in range(400):
        sums = (random.lognormal(0.0, 1.6, 8) * tokens)[:, None]
        held["bootstrap"] += (narrow := bootstrap_intervals(sums, tokens)[0]).low <= truth <= narrow.high
        held["reported"] += (wide := nonnegative_intervals(sums, tokens)[0]).low <= truth <= wide.high
    assert held["bootstrap"] < 345
    assert held["reported"] > 352
