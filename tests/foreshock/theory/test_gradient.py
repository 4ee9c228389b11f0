"""Gradient noise from norms, and its cost for a step."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreshock.errors import InvalidArgumentError
from foreshock.theory import GradientNorms, evaluate_theory, gradient_noise, step_noise
from tests.foreshock.batches import compared, random_batch


def drawn_norms(
    generator: np.random.Generator, mean: np.ndarray, deviation: float, small: int, large: int
) -> tuple[float, float]:
    """Return the mean ‖g_b‖² and ‖g_B‖² of one batch of prompts with independent gradients."""
    gradients = mean + deviation * generator.standard_normal((large, mean.size))
    parts = gradients.reshape(large // small, small, mean.size).mean(axis=1)
    return float(np.square(parts).sum(axis=1).mean()), float(np.square(gradients.mean(axis=0)).sum())


def test_variance_estimate_matches_sampled_gradients() -> None:
    generator = np.random.default_rng(0)
    mean, deviation = np.full(50, 0.1), 0.3
    squares = np.array([drawn_norms(generator, mean, deviation, 4, 32) for _ in range(2000)])
    of_small, of_large = squares.mean(axis=0)
    found = gradient_noise(GradientNorms(math.sqrt(of_small), math.sqrt(of_large), 4, 32))
    assert found.variance == pytest.approx(50 * 0.09, rel=0.02)
    assert found.of_batch == found.variance / 32
    assert found.signal == pytest.approx(0.5, rel=0.03)
    assert found.batch_prompts_for_parity == pytest.approx(9.0, rel=0.05)
    assert found.notes == ()


def test_negative_variance_is_reported_with_a_note() -> None:
    found = gradient_noise(GradientNorms(1.0, 1.2, 1, 8))
    assert found.variance == pytest.approx((1.0 - 1.44) / (1 - 1 / 8))
    assert found.notes


@given(st.floats(1e-8, 1.0), st.floats(1e-100, 1e6), st.floats(0.0, 1e3))
def test_halving_learning_rate_quarters_noise_exactly(rate: float, variance: float, bias: float) -> None:
    found = step_noise(rate, variance, bias)
    assert found.at_learning_rate == 4.0 * found.at_half
    assert found.at_learning_rate == pytest.approx(rate * rate / 2 * (variance + bias**2))


@pytest.mark.parametrize(
    ("norms", "argument"),
    [
        (GradientNorms(-1.0, 1.0, 1, 8), "micro_batch"), (GradientNorms(1.0, math.nan, 1, 8), "batch"),
        (GradientNorms(1e200, 1.0, 1, 8), "micro_batch"), (GradientNorms(1.0, 1.0, 0, 8), "micro_batch_prompts"),
        (GradientNorms(1.0, 1.0, 8, 8), "batch_prompts"), (GradientNorms(1.0, 1.0, 8, math.inf), "batch_prompts"),
    ],
)  # fmt: skip
def test_invalid_norms_are_refused_by_name(norms: GradientNorms, argument: str) -> None:
    with pytest.raises(InvalidArgumentError) as refused:
        gradient_noise(norms)
    assert refused.value.argument == argument


def test_negative_learning_rate_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="learning_rate"):
        step_noise(-1e-6, 1.0)


def test_step_noise_counts_bias_if_gradient_bound_is_given() -> None:
    comparison = compared(random_batch(seed=9, largest=0.4))
    norms = GradientNorms(2.0, 1.0, 1, 8)
    found = evaluate_theory(
        comparison.statistics, comparison.summaries, norms=norms, learning_rate=1e-3, gradient_bound=0.5
    )
    assert found.gradient == gradient_noise(norms)
    assert found.step_noise is not None
    assert found.step_noise_with_bias is not None
    variance = 3.0 / (1 - 1 / 8) / 8
    assert found.step_noise.at_learning_rate == pytest.approx(0.5e-6 * variance)
    bias = 0.5 * found.bias.per_unit
    assert found.step_noise_with_bias.at_learning_rate == pytest.approx(0.5e-6 * (variance + bias**2))
    # If the bias overflows there is no noise term with it.
    beyond = evaluate_theory(
        comparison.statistics, comparison.summaries, norms=norms, learning_rate=1e-3, gradient_bound=1e308
    )
    assert (beyond.step_noise, beyond.step_noise_with_bias) == (found.step_noise, None)
    alone = evaluate_theory(comparison.statistics, comparison.summaries, norms=norms, learning_rate=1e-3)
    assert alone.step_noise_with_bias is None
    with pytest.raises(InvalidArgumentError, match="gradient_bound"):
        evaluate_theory(
            comparison.statistics, comparison.summaries, norms=norms, learning_rate=1e-3, gradient_bound=-1.0
        )
