"""The terms of e^x are accurate to the last digits over the whole range."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from foreshock.measures.passes import loops
from foreshock.measures.passes.loops import BLOCK

Float64 = NDArray[np.float64]

# Units in the last place.
ROUNDING = 2.0**-52


def rows(target: Float64, behaviour: Float64) -> Float64:
    """Return [ROWS, T] rows of any number of tokens, filled a block at a time."""
    parts = []
    for begin in range(0, target.size, BLOCK):
        n = min(BLOCK, target.size - begin)
        work = np.full((loops.ROWS, BLOCK), np.nan)
        work[loops.LOG_TARGET, :n], work[loops.LOG_BEHAVIOUR, :n] = target[begin:][:n], behaviour[begin:][:n]
        loops.fill_ratios(n, work)
        loops.fill_probabilities(n, work)
        parts.append(work[:, :n])
    return np.concatenate(parts, axis=1)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_ratios_are_accurate_to_a_few_units_in_the_last_place(sign: float) -> None:
    x = np.concatenate([np.logspace(-12, math.log10(700), 3000), np.arange(1, 1000) * math.log(2) / 2, [5e-324]])
    x = x[x < 700]
    found = rows(sign * x, np.zeros_like(x))
    for row, expected in (
        (loops.GROWTH, np.expm1(x)),
        (loops.SHRINKAGE, -np.expm1(-x)),
        (loops.ABOVE, np.expm1(sign * x)),
        (loops.DECAY, np.exp(-x)),
    ):
        # Beyond e^690 the decay is 1e-300, equal to the exact value within the tolerance.
        np.testing.assert_allclose(found[row], expected, rtol=4 * ROUNDING, atol=2e-300)
    np.testing.assert_array_equal(found[loops.ABS_D], x)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_k3_is_accurate_near_agreement(sign: float) -> None:
    x = np.logspace(-12, -1, 500)
    found = rows(sign * x, np.zeros_like(x))[loops.K3]
    series = [math.fsum((sign * value) ** power / math.factorial(power) for power in range(2, 20)) for value in x]
    np.testing.assert_allclose(found, series, rtol=8 * ROUNDING, atol=0)
    far = np.linspace(0.1, 300, 999)
    np.testing.assert_allclose(
        rows(sign * far, np.zeros_like(far))[loops.K3], np.expm1(sign * far) - sign * far, rtol=64 * ROUNDING
    )


def test_only_overflowing_terms_are_infinite() -> None:
    d = np.array([800.0, -800.0, 0.0, 1e300, -1e300, -1e9, -3e38])
    found = rows(d, np.zeros_like(d))
    np.testing.assert_array_equal(found[loops.ABOVE], [math.inf, -1.0, 0.0, math.inf, -1.0, -1.0, -1.0])
    np.testing.assert_array_equal(found[loops.GROWTH], [math.inf, math.inf, 0.0, *[math.inf] * 4])
    # Substitutes for "no log-prob", such as −1e9 and the smallest float32, give a finite k3.
    np.testing.assert_array_equal(found[loops.K3], [math.inf, 799.0, 0.0, math.inf, 1e300, 1e9 - 1.0, 3e38])


def test_probabilities_are_accurate_and_their_difference_has_no_cancellation() -> None:
    random = np.random.default_rng(0)
    target = -random.exponential(random.choice([0.01, 1.0, 50.0, 300.0], 5000))
    behaviour = np.minimum(target + random.normal(0, 1, 5000) * 10.0 ** random.integers(-9, 2, 5000), 0.0)
    found = rows(target, behaviour)
    np.testing.assert_allclose(found[loops.TARGET], np.exp(target), rtol=1e-13, atol=1e-306)
    np.testing.assert_allclose(found[loops.BEHAVIOUR], np.exp(behaviour), rtol=1e-13, atol=1e-306)
    difference = np.exp(np.maximum(target, behaviour)) * -np.expm1(-np.abs(target - behaviour))
    np.testing.assert_allclose(found[loops.DIFFERENCE], difference, rtol=8 * ROUNDING, atol=1e-306)


def test_any_log_prob_gives_at_most_infinity() -> None:
    log_probs = np.array([-1e4, -745.0, -708.0, 0.0, 0.5, 709.0, 711.0])
    found = rows(log_probs, log_probs)[loops.TARGET]
    expected = [0.0, 0.0, 0.0, 1.0, math.exp(0.5), math.exp(709.0), math.inf]
    np.testing.assert_allclose(found, expected, rtol=4 * ROUNDING, atol=1e-306)
