"""The bootstrap-t by prompt group: coverage of skewed means, reproducibility, and undefined cases."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from foreshock.measures.estimators import bootstrap
from foreshock.measures.estimators.bootstrap import LEAST_CLUSTERS, bootstrap_interval, bootstrap_intervals
from foreshock.measures.estimators.intervals import clustered_interval

Batch = tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.int64]]


def batch(seed: int, groups: int = 24, of_each: int = 4) -> Batch:
    """Return sums, tokens and groups of rollouts with skewed values that are similar within a group."""
    random = np.random.default_rng(seed)
    tokens = random.integers(5, 50, groups * of_each)
    of_groups = np.repeat(random.lognormal(0.0, 0.7, groups), of_each)
    return random.gamma(tokens * 0.2, 5.0) * of_groups, tokens, np.repeat(np.arange(groups), of_each)


def drawn_one_by_one(sums: NDArray[np.float64], tokens: NDArray[np.int64], resamples: int) -> tuple[float, float]:
    """Return the bootstrap-t of a ratio mean, computed resample by resample."""
    random = np.random.default_rng(7)
    mean = sums.sum() / tokens.sum()

    def error(s: NDArray[np.float64], t: NDArray[np.int64]) -> float:
        return float(np.sqrt(np.square(s - s.sum() / t.sum() * t).sum()) / t.sum())

    studentised = []
    for _ in range(resamples):
        drawn = random.integers(0, tokens.size, tokens.size)
        s, t = sums[drawn], tokens[drawn]
        studentised.append((s.sum() / t.sum() - mean) / error(s, t))
    low, high = np.quantile(studentised, [0.975, 0.025], method="weibull")
    return mean - low * error(sums, tokens), mean - high * error(sums, tokens)


def test_interval_equals_a_resample_by_resample_bootstrap_t() -> None:
    sums, tokens, groups = batch(0)
    found = bootstrap_interval(sums, tokens, groups, resamples=20_000)
    group_sums = np.bincount(groups, weights=sums).astype(np.float64)
    group_tokens = np.bincount(groups, weights=tokens).astype(np.int64)
    low, high = drawn_one_by_one(group_sums, group_tokens, resamples=20_000)
    assert found.mean == pytest.approx(sums.sum() / tokens.sum(), rel=1e-12)
    assert found.clusters == 24
    assert found.low == pytest.approx(low, rel=0.02)
    assert found.high == pytest.approx(high, rel=0.02)


def test_coverage_of_a_skewed_mean_exceeds_students_t() -> None:
    random = np.random.default_rng(1)
    held = {"bootstrap": 0, "t": 0}
    tokens = np.full(24, 10)
    truth = math.exp(0.5)
    for _ in range(1000):
        sums = random.lognormal(0.0, 1.0, 24) * 10
        for name, found in (
            ("bootstrap", bootstrap_interval(sums, tokens, resamples=399)),
            ("t", clustered_interval(sums, tokens)),
        ):
            held[name] += found.low <= truth <= found.high
    assert held["bootstrap"] > 910
    assert held["bootstrap"] > held["t"] + 20


def test_upper_end_is_longer_for_skewed_values() -> None:
    sums, tokens, groups = batch(3, groups=40)
    found = bootstrap_interval(sums, tokens, groups)
    assert found.high - found.mean > 1.3 * (found.mean - found.low) > 0


def test_many_even_groups_give_students_interval() -> None:
    random = np.random.default_rng(4)
    tokens = random.integers(90, 110, 1000)
    sums = random.normal(0.5, 0.1, 1000) * tokens
    found, exact = bootstrap_interval(sums, tokens, resamples=4000), clustered_interval(sums, tokens)
    assert found.low == pytest.approx(exact.low, abs=0.1 * (exact.high - exact.low))
    assert found.high == pytest.approx(exact.high, abs=0.1 * (exact.high - exact.low))


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**20), scale=st.floats(1e-12, 1e12))
def test_common_factor_scales_the_interval(seed: int, scale: float) -> None:
    sums, tokens, groups = batch(seed)
    one, other = bootstrap_interval(sums, tokens, groups), bootstrap_interval(sums * scale, tokens, groups)
    assert other.low == pytest.approx(one.low * scale, rel=1e-6)
    assert other.high == pytest.approx(one.high * scale, rel=1e-6)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**20))
def test_result_does_not_depend_on_other_columns_or_on_order_within_groups(seed: int) -> None:
    sums, tokens, groups = batch(seed)
    table = np.stack([sums, np.square(sums), -sums], axis=1)
    together = bootstrap_intervals(table, tokens, groups)
    order = np.random.default_rng(seed).permutation(tokens.size)
    for column, found in zip(table.T, together, strict=True):
        alone = bootstrap_interval(column[order], tokens[order], groups[order])
        assert found.low == pytest.approx(alone.low, rel=1e-9)
        assert found.high == pytest.approx(alone.high, rel=1e-9)
    assert together[2].low == pytest.approx(-together[0].high, rel=1e-9)


def test_same_input_gives_the_same_interval_and_another_seed_a_similar_one() -> None:
    sums, tokens, groups = batch(5)
    found = bootstrap_interval(sums, tokens, groups)
    assert found == bootstrap_interval(sums, tokens, groups)
    other = bootstrap_interval(sums, tokens, groups, seed=99)
    assert other.low != found.low
    assert other.low == pytest.approx(found.low, rel=0.05)


def test_resamples_do_not_depend_on_the_block_size(monkeypatch: pytest.MonkeyPatch) -> None:
    sums, tokens, groups = batch(6)
    whole = bootstrap_interval(sums, tokens, groups)
    monkeypatch.setattr(bootstrap, "_DRAWS_AT_ONCE", 100)
    assert bootstrap_interval(sums, tokens, groups) == pytest.approx(whole)


@pytest.mark.parametrize(("seed", "of_groups", "of_each"), [(0, 24, 4), (4, 8, 8)])
def test_rounding_of_the_matrix_product_does_not_show(
    monkeypatch: pytest.MonkeyPatch, seed: int, of_groups: int, of_each: int
) -> None:
    """A few rollouts dominate the means, so that most terms of a resample's error cancel."""
    random = np.random.default_rng(seed)
    tokens = random.integers(50, 800, of_groups * of_each)
    sums = random.pareto(0.3, (tokens.size, 3)) * tokens[:, None]
    groups = np.repeat(np.arange(of_groups), of_each)
    found = bootstrap_intervals(sums, tokens, groups)

    def exact(weights: NDArray[np.float64], table: NDArray[np.float64]) -> NDArray[np.float64]:
        product = weights.astype(np.longdouble) @ table.astype(np.longdouble)
        return product.astype(np.float64)

    monkeypatch.setattr(bootstrap, "_product", exact)
    for one, other in zip(found, bootstrap_intervals(sums, tokens, groups), strict=True):
        assert one.low == pytest.approx(other.low, rel=1e-12)
        assert one.high == pytest.approx(other.high, rel=1e-12)


@pytest.mark.parametrize("seed", range(8))
def test_an_end_is_as_exact_as_its_sums_when_one_cluster_has_most_of_the_mean(seed: int) -> None:
    random = np.random.default_rng(seed)
    sums = np.array([0.7, 1e-5, 4e-6, 2e-7, 5e-6, 4e-3, 8e-5, 6e-6]) * random.uniform(0.5, 2, 8)
    tokens = random.integers(300, 500, 8)
    found = bootstrap_interval(sums, tokens)
    moved = bootstrap_interval(sums * (1 + 1e-15 * random.normal(size=8)), tokens)
    assert (moved.low, moved.high) == pytest.approx((found.low, found.high), rel=1e-13, abs=1e-13 * found.high)


def test_combined_clusters_keep_their_error() -> None:
    random = np.random.default_rng(8)
    tokens = random.integers(50, 150, 50_000)
    sums = random.gamma(2.0, 0.5, 50_000) * tokens
    found, exact = bootstrap_interval(sums, tokens), clustered_interval(sums, tokens)
    assert found.clusters == 50_000
    assert found.high - found.low == pytest.approx(exact.high - exact.low, rel=0.1)


def test_undefined_intervals_are_nan() -> None:
    sums, tokens, _ = batch(9, groups=LEAST_CLUSTERS, of_each=1)
    assert bootstrap_interval(sums, tokens).low < bootstrap_interval(sums, tokens).high
    few = bootstrap_interval(sums[1:], tokens[1:])
    assert math.isfinite(few.mean)
    assert math.isnan(few.low)
    assert math.isnan(few.high)
    nothing = bootstrap_interval(np.zeros(3), np.zeros(3, np.int64))
    assert math.isnan(nothing.mean)
    assert nothing.clusters == 0


def test_overflow_affects_its_own_column_only() -> None:
    sums, tokens, groups = batch(10)
    spoilt = sums.copy()
    spoilt[3] = math.inf
    first, second = bootstrap_intervals(np.stack([sums, spoilt], axis=1), tokens, groups)
    alone = bootstrap_interval(sums, tokens, groups)
    assert (first.low, first.high) == pytest.approx((alone.low, alone.high), rel=1e-9)
    assert math.isnan(second.low)
    assert math.isnan(second.high)


def test_identical_groups_have_an_interval_of_width_zero() -> None:
    found = bootstrap_interval(np.full(20, 6.0), np.full(20, 3))
    assert (found.mean, found.low, found.high) == (2.0, 2.0, 2.0)


@pytest.mark.parametrize("seed", range(8))
def test_groups_that_have_one_mean_but_for_rounding_have_an_interval_of_width_zero(seed: int) -> None:
    random = np.random.default_rng(seed)
    tokens = random.integers(3, 90, 20)
    found = bootstrap_interval(0.1 * tokens * (1 + 1e-15 * random.normal(size=20)), tokens)
    assert found.mean == pytest.approx(0.1)
    assert found.low == found.mean == found.high


def test_mean_from_one_rollout_has_no_interval() -> None:
    sums, tokens, _ = batch(12)
    sums[5] *= 1e12
    found = bootstrap_interval(sums, tokens)
    assert math.isfinite(found.mean)
    assert math.isnan(found.low)
    assert math.isnan(found.high)
    sums[5] /= 1e9
    assert math.isfinite(bootstrap_interval(sums, tokens).high)


def test_rollouts_without_tokens_are_ignored() -> None:
    sums, tokens, groups = batch(11)
    more = np.append(sums, 0.0), np.append(tokens, 0), np.append(groups, 999)
    assert bootstrap_interval(*more) == bootstrap_interval(sums, tokens, groups)
