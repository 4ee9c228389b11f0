"""The tail shape k̂: known shapes are recovered at any scale, and undefined cases give NaN."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from foreshock.measures.estimators.pareto import LEAST_TAIL, pareto_shape, tail_size

Float64 = NDArray[np.float64]


def falling(values: Float64) -> Float64:
    return np.sort(values)[::-1]


def pareto_logs(shape: float, count: int, seed: int = 0) -> Float64:
    """Return the logarithms of a generalised Pareto sample with σ = 1, falling."""
    uniform = np.random.default_rng(seed).random(count)
    sample = -np.log(uniform) if shape == 0.0 else np.expm1(-shape * np.log(uniform)) / shape
    return falling(np.log(sample))


def by_the_papers_formulas(values: Float64) -> float:
    """Return Zhang and Stephens' estimate with the weak prior of PSIS, without logarithms; `values` are above the
    threshold.
    """
    values = np.sort(values)
    size = len(values)
    points = 30 + int(math.sqrt(size))
    quartile = values[int(size / 4 + 0.5) - 1]
    theta = [1 / values[-1] + (1 - math.sqrt(points / (j - 0.5))) / (3 * quartile) for j in range(1, points + 1)]
    shape = [np.log1p(-t * values).mean() for t in theta]
    profile = [size * (math.log(-t / k) - k - 1) for t, k in zip(theta, shape, strict=True)]
    weight = [math.exp(one - max(profile)) for one in profile]
    mean = sum(t * w for t, w in zip(theta, weight, strict=True)) / sum(weight)
    return float((size * np.log1p(-mean * values).mean() + 10 * 0.5) / (size + 10))


@pytest.mark.parametrize("shape", [-0.4, -0.1, 0.0, 0.2, 0.5, 0.8, 1.5])
@pytest.mark.parametrize(("count", "kept"), [(20_000, 20_000), (1_000_000, 1024)])
def test_shape_of_a_pareto_tail_is_recovered(shape: float, count: int, kept: int) -> None:
    found = pareto_shape(pareto_logs(shape, count)[:kept], count)
    tail = min(tail_size(count), kept - 1)
    # The estimate's asymptotic error is (1 + k)/√n; the prior shifts it towards ½ by (½ − k)·10/(n + 10).
    drawn = (tail * shape + 5.0) / (tail + 10)
    assert found == pytest.approx(drawn, abs=3.5 * (1.0 + shape) / math.sqrt(tail))


@settings(max_examples=40, deadline=None)
@given(
    shape=st.integers(-50, 200).map(lambda percent: percent / 100),
    count=st.integers(40, 3000),
    seed=st.integers(0, 2**20),
)
def test_estimate_equals_the_papers_formulas(shape: float, count: int, seed: int) -> None:
    logs = pareto_logs(shape, count, seed)
    size = tail_size(count)
    if not size >= LEAST_TAIL or not logs[0] > logs[size - 1]:
        return
    direct = by_the_papers_formulas(np.exp(logs[:size]) - math.exp(logs[size]))
    assert pareto_shape(logs, count) == pytest.approx(direct, rel=1e-9, abs=1e-9)


@settings(max_examples=40, deadline=None)
@given(
    factor=st.floats(-1e5, 1e5),
    shape=st.integers(-50, 300).map(lambda percent: percent / 100),
    seed=st.integers(0, 2**20),
)
def test_common_factor_has_no_effect_and_does_not_overflow(factor: float, shape: float, seed: int) -> None:
    logs = pareto_logs(shape, 2000, seed)
    expected = pareto_shape(logs, logs.size)
    assert pareto_shape(logs + factor, logs.size) == pytest.approx(expected, rel=1e-6, abs=1e-6)


@settings(max_examples=10, deadline=None)
@given(cuts=st.lists(st.integers(0, 5_000), max_size=6), seed=st.integers(0, 2**20))
def test_merged_largest_values_equal_those_of_the_whole_sample(cuts: list[int], seed: int) -> None:
    d = np.random.default_rng(seed).standard_t(3.0, 5_000) * 0.1
    kept = 1024
    merged = np.zeros(0)
    for part in np.split(d, sorted(cuts)):
        merged = falling(np.concatenate([merged, falling(part)[:kept]]))[:kept]
    assert pareto_shape(merged, d.size) == pareto_shape(falling(d), d.size)


def test_ties_and_rounded_log_probs_change_little() -> None:
    random = np.random.default_rng(5)
    d = random.standard_t(3.0, 200_000) * 0.05
    exact = pareto_shape(falling(d)[:1024], d.size)
    # d as a difference of float32 log-probs, and on a grid so coarse that most of the tail is tied.
    behaviour = -random.exponential(2.0, d.size)
    rounded = (behaviour + d).astype(np.float32).astype(np.float64) - behaviour.astype(np.float32).astype(np.float64)
    assert pareto_shape(falling(rounded)[:1024], d.size) == pytest.approx(exact, abs=1e-3)
    coarse = np.round(d, 3)
    assert len(np.unique(falling(coarse)[:1024])) < 600
    assert pareto_shape(falling(coarse)[:1024], d.size) == pytest.approx(exact, abs=0.03)


def test_undefined_shapes_are_nan() -> None:
    logs = pareto_logs(0.3, 1000)
    assert math.isnan(pareto_shape(logs[:0], 0))
    assert math.isnan(pareto_shape(logs[:LEAST_TAIL], 1000))
    assert math.isfinite(pareto_shape(logs[: LEAST_TAIL + 1], 1000))
    assert math.isnan(pareto_shape(falling(logs[:20]), 20))
    assert math.isnan(pareto_shape(np.zeros(1000), 1000))
    two_values = np.concatenate([np.ones(50), np.zeros(950)])
    assert math.isnan(pareto_shape(two_values, two_values.size))
    for broken in (math.inf, math.nan):
        assert math.isnan(pareto_shape(np.concatenate([[broken], logs[:-1]]), 1000))


def test_zero_weights_below_the_tail_have_no_effect() -> None:
    logs = pareto_logs(0.3, 1000)
    with_zeros = np.concatenate([logs[:60], np.full(940, -math.inf)])
    assert math.isfinite(pareto_shape(with_zeros, 1000))


def test_more_values_than_the_count_are_rejected() -> None:
    with pytest.raises(ValueError, match="at most count values, got 5 values, count=4"):
        pareto_shape(np.zeros(5), 4)
