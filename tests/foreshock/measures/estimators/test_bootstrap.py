"""The bootstrap-t by prompt group: coverage of skewed means, reproducibility, and undefined cases."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from foreshock.measures.comparison_statistics import ComparisonStatistics
from foreshock.measures.estimators import bootstrap
from foreshock.measures.estimators.bootstrap import (
    LEAST_CLUSTERS,
    bootstrap_interval,
    bootstrap_intervals,
    effective_number,
    effective_of_all,
    high_from_spread,
    interval_warning,
    nonnegative_intervals,
)
from foreshock.measures.estimators.intervals import student_t_quantile
from tests.foreshock.measures.clustered import clustered_interval

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
def test_rounding_does_not_show(monkeypatch: pytest.MonkeyPatch, seed: int, of_groups: int, of_each: int) -> None:
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


def of_groups(sums: list[float]) -> float:
    values = np.array(sums)
    return effective_number(float(values.sum()), float(np.square(values).sum()))


def test_effective_number_counts_groups_that_contribute_the_same() -> None:
    assert of_groups([3.0] * 8) == pytest.approx(8.0)
    assert of_groups([3.0] * 5 + [0.0] * 3) == pytest.approx(5.0)
    assert of_groups([1.0] + [1e-9] * 7) == pytest.approx(1.0)
    for nothing in (of_groups([0.0] * 8), effective_number(math.inf, math.inf), effective_number(math.nan, 1.0)):
        assert math.isnan(nothing)


# The squares of smaller sums underflow.
@given(st.lists(st.floats(1e-100, 1e6) | st.just(0.0), min_size=1, max_size=50))
def test_effective_number_is_at_most_the_number_of_groups(sums: list[float]) -> None:
    found = of_groups(sums)
    assert math.isnan(found) or 1.0 - 1e-9 <= found <= len(sums) + 1e-9


def test_high_end_is_coxs_for_log_normal_groups_of_equal_size() -> None:
    random = np.random.default_rng(3)
    means = random.lognormal(0.0, 1.0, 8)
    variance = float(np.log(means).var(ddof=1))
    error = math.sqrt(variance / 8 + variance**2 / 14)
    clustered = float(means.std(ddof=1)) / math.sqrt(8) / float(means.mean())
    assert error > clustered
    (found,) = high_from_spread(means[:, None] * 100, np.full(8, 100.0))
    assert found == pytest.approx(means.mean() * math.exp(student_t_quantile(0.975, 7) * error))


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


def test_warning_names_the_number_and_the_threshold() -> None:
    heavy = {"prompt_groups": 8, "effective_groups": 5.2, "pareto_k": 0.1, "pareto_k_inverse": 0.42}
    assert (interval_warning(heavy) or "").startswith(
        "The tail of d has the shape k̂ = 0.42, above 0.3: tokens too rare for this batch"
    )
    assert "4 prompt groups: a range of k3 needs 5" in (interval_warning({**heavy, "prompt_groups": 4}) or "")
    assert interval_warning({**heavy, "pareto_k_inverse": None}) is None
    assert interval_warning({}) is None


def test_effective_groups_are_shown_with_the_number_of_groups() -> None:
    assert effective_of_all({"effective_groups": 5.23, "prompt_groups": 8}) == "5.2 of 8"
    assert effective_of_all({"effective_groups": None, "prompt_groups": 8}) == "–"


def statistics_of(scales: np.ndarray, degrees: int) -> ComparisonStatistics:
    """Return the statistics of one rollout of 4,000 tokens per group, with d = scale · Student's t."""
    random = np.random.default_rng(11)
    d = 0.01 * np.repeat(scales, 4000) * random.standard_t(degrees, scales.size * 4000)
    behaviour = np.full(d.size, -5.0)
    offsets = np.arange(scales.size + 1) * 4000
    return ComparisonStatistics.of(behaviour + d, behaviour, offsets, group_ids=range(scales.size))


def test_measures_of_even_and_of_uneven_groups() -> None:
    even = statistics_of(np.ones(8), 30).measures()
    assert even["prompt_groups"] == 8
    assert 7.5 < even["effective_groups"] <= 8.0
    assert interval_warning(even) is None
    uneven = statistics_of(np.array([10.0] + [1.0] * 7), 30).measures()
    assert 1.0 < uneven["effective_groups"] < 1.4
    heavy = statistics_of(np.ones(8), 2).measures()
    assert "may lie far above" in (interval_warning(heavy) or "")
