"""The range over prompts holds exact values: a tiny policy's divergences over its whole distribution."""

from __future__ import annotations

import numpy as np
import pytest

from foreshock.measures.estimators.bootstrap import bootstrap_intervals
from tests.foreshock.measures.estimators.tiny_policy import LENGTH_LIMIT, PROMPTS, Sampler, TinyPolicy, rounded

MEASURES = ("k3_kl", "chi2_token", "tv_token")
LEVELS = (8, 6, 4)  # significant bits: bfloat16 has 8, float8 e4m3 has 4


def divergences(behaviour: TinyPolicy, target: TinyPolicy) -> np.ndarray:
    """Return k3, (ρ − 1)² and (1 − ρ)⁺ of every state and token, stacked last."""
    d = target.log_probs - behaviour.log_probs
    rho_minus_one = np.expm1(d)
    return np.stack([rho_minus_one - d, np.square(rho_minus_one), np.maximum(-rho_minus_one, 0.0)], axis=-1)


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
    """Of 128 prompts with 8 rollouts each, over 200 batches; the share has a standard error of 1.5 %."""
    policy, batches, prompts, seed = TinyPolicy.of(20261121), 200, 128, 20261121
    values = np.concatenate([divergences(policy, TinyPolicy.of(seed, bits)) for bits in LEVELS], axis=-1)
    totals, length = policy.expectations(values)
    table, random = values.reshape(-1, values.shape[-1]), np.random.default_rng(1)
    sampler, groups = Sampler.of(policy), np.repeat(np.arange(prompts), 8)
    held, means = [], []
    for _ in range(batches):
        drawn = np.repeat(random.integers(0, PROMPTS, prompts), 8)
        sums, tokens = np.zeros((drawn.size, table.shape[1])), np.zeros(drawn.size, np.int64)
        for running, places in sampler.responses(drawn, random):
            sums[running] += table[places]
            tokens[running] += 1
        found = bootstrap_intervals(sums, tokens, groups)
        held.append([each.low <= exact <= each.high for each, exact in zip(found, totals / length, strict=True)])
        means.append([each.mean for each in found])
    assert (np.mean(held, axis=0) >= 0.88).all()
    bias = np.mean(means, axis=0) - totals / length
    assert (np.abs(bias) < 4.0 * np.std(means, axis=0) / np.sqrt(batches)).all()
