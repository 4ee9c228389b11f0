"""The exact values of the coverage benchmark: a tiny policy's divergences over its whole distribution."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.coverage import BAR, MEASURES, RECOMMENDED, Setting, cells_of, divergences
from benchmarks.tiny_policy import LENGTH_LIMIT, PROMPTS, Sampler, TinyPolicy, Traits, rounded


@pytest.fixture(scope="module")
def behaviour() -> TinyPolicy:
    return TinyPolicy.of(5)


@pytest.fixture(scope="module")
def target() -> TinyPolicy:
    return TinyPolicy.of(5, 4)


def test_rounding_keeps_significant_bits() -> None:
    assert rounded(np.array([1.0, 1.0 + 2**-7, 1.0 + 2**-9, -3.141]), 8).tolist() == [1.0, 1.0 + 2**-7, 1.0, -3.140625]
    values = np.random.default_rng(0).normal(size=100)
    assert np.abs(rounded(values, 8) / values - 1).max() <= 2**-8
    assert (rounded(values, None) == values).all()


def test_sampled_estimators_have_the_exact_divergences_as_expectation(
    behaviour: TinyPolicy, target: TinyPolicy
) -> None:
    """μ covers π: k3 estimates KL(μ‖π), (ρ − 1)² estimates χ²(π‖μ), (1 − ρ)⁺ TV, and ρ has the mean 1."""
    mu, pi = np.exp(behaviour.log_probs), np.exp(target.log_probs)
    d = target.log_probs - behaviour.log_probs
    by_state = [
        (mu * -d).sum(axis=-1),
        (np.square(pi - mu) / mu).sum(axis=-1),
        0.5 * np.abs(pi - mu).sum(axis=-1),
        np.zeros(mu.shape[:3]),
    ]
    exact = np.stack([np.broadcast_to(values[..., None], mu.shape) for values in by_state], axis=-1)
    sampled = np.concatenate([divergences(behaviour, target), np.expm1(d)[..., None]], axis=-1)
    of_exact, length = behaviour.expectations(exact)
    of_sampled, _ = behaviour.expectations(sampled)
    np.testing.assert_allclose(of_sampled, of_exact, rtol=1e-9, atol=1e-9 * length)


def test_mean_of_many_responses_converges_to_the_exact_value(behaviour: TinyPolicy, target: TinyPolicy) -> None:
    values = divergences(behaviour, target)
    totals, length = behaviour.expectations(values)
    table = values.reshape(-1, len(MEASURES))
    random = np.random.default_rng(6)
    prompts = np.repeat(np.arange(PROMPTS), 40)
    sums, tokens = np.zeros((prompts.size, len(MEASURES))), np.zeros(prompts.size)
    for running, places in Sampler.of(behaviour).responses(prompts, random):
        sums[running] += table[places]
        tokens[running] += 1
    assert 1 <= tokens.min() < tokens.max() == LENGTH_LIMIT
    error = tokens.std() / np.sqrt(tokens.size)
    assert abs(tokens.mean() - length) < 4 * error
    residuals = sums - tokens[:, None] * totals / length
    assert (np.abs(residuals.mean(axis=0)) < 4 * residuals.std(axis=0) / np.sqrt(tokens.size)).all()


@pytest.mark.slow
def test_recommended_interval_covers_the_exact_value() -> None:
    cells = cells_of(Setting("even prompts", Traits(), (128,), 1.0, 128), batches=200)
    assert len(cells) == 9
    for cell in cells:
        # Three standard errors of a share of 200 below the bar of the benchmark.
        assert BAR[0] - 0.05 <= cell.coverage(RECOMMENDED), cell.measure
        assert abs(cell.bias_in_errors) < 4.0, cell.measure
