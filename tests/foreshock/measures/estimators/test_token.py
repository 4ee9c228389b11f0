"""Per-token formulas at the ends of their range, and with precomputed parts."""

import math
from fractions import Fraction

import numpy as np
import pytest
from numpy.typing import NDArray

from foreshock.measures import ComparisonStatistics
from foreshock.measures.estimators import token
from tests.foreshock.measures.direct import TOKEN_FORMULAS

D = np.array([-30.0, -2.0, -0.5, -1e-3, -1e-9, 0.0, 1e-9, 1e-3, 0.5, 2.0, 30.0])


@pytest.mark.parametrize("name", ["k3_kl", "chi2_token", "reverse_chi2_token", "tv_token"])
def test_formula_equals_its_definition(name: str) -> None:
    found = getattr(token, name)(D)
    for value, expected in zip(found.tolist(), (TOKEN_FORMULAS[name](d) for d in D.tolist()), strict=True):
        assert value == pytest.approx(expected, rel=1e-12, abs=1e-24)
    assert found.dtype == np.float64


def k3_in_rational_numbers(d: float) -> Fraction:
    x = Fraction(d)
    return sum((x**power / math.factorial(power) for power in range(3, 30)), x * x / 2)


def test_tiny_k3_is_accurate_and_never_negative() -> None:
    d = np.concatenate([np.logspace(-12, 0, 200), [2.0**-5, np.nextafter(2.0**-5, 0)]])
    for signed in (d, -d):
        expected = [float(k3_in_rational_numbers(value)) for value in signed.tolist()]
        np.testing.assert_allclose(token.k3_kl(signed), expected, rtol=2e-14, atol=0)
    assert token.k3_kl(np.zeros(1))[0] == 0.0


def test_overflow_is_infinite_without_a_warning() -> None:
    with np.errstate(all="raise"):
        assert token.k3_kl(np.array([1e4]))[0] == math.inf
        assert token.reverse_chi2_token(np.array([-1e4]))[0] == math.inf
        assert token.tv_token(np.array([-1e4]))[0] == 1.0


def statistics(d: NDArray[np.float64], tokens: int = 1) -> ComparisonStatistics:
    """Return the statistics of d as rollouts of `tokens` tokens each; μ is low enough that π ≤ 1 for any d."""
    return ComparisonStatistics.of(np.full(d.size, -40.0) + d, np.full(d.size, -40.0), np.arange(0, d.size + 1, tokens))


def test_pareto_k_shows_an_infinite_variance() -> None:
    """d with a tail exp(−2d) gives ρ a tail ρ^−2: k = ½, where the variance becomes infinite; 1/ρ is bounded."""
    d = np.random.default_rng(0).exponential(0.5, 200_000)
    heavy, turned = statistics(d, 100).measures(), statistics(-d, 100).measures()
    assert heavy["pareto_k"] == pytest.approx(0.5, abs=0.07)
    assert heavy["pareto_k_inverse"] < 0.0
    assert turned["pareto_k_inverse"] == heavy["pareto_k"]
    assert turned["pareto_k"] == heavy["pareto_k_inverse"]


def test_sequence_sums_do_not_overflow() -> None:
    measures = statistics(np.full(4000, 2.0), 2000).measures()
    assert measures["sequence_log_ppl_abs_diff"] == 4000.0
    assert measures["log_ppl_abs_diff"] == 2.0
    assert measures["verl_chi2_seq"] == math.inf
    assert math.isnan(measures["ess_seq"])


def test_correlation_of_nearly_constant_probabilities_is_accurate() -> None:
    """Their moments cancel in all but the last digits: naive sums of squares give noise here."""
    generator = np.random.default_rng(0)
    target = -2.0 + 1e-6 * generator.normal(size=2000)
    behaviour = target + 1e-6 * generator.normal(size=2000)
    measures = ComparisonStatistics.of(target, behaviour, np.arange(0, 2001, 10)).measures()
    expected = np.corrcoef(np.exp(target), np.exp(behaviour))[0, 1]
    assert measures["rollout_actor_probs_pearson_corr"] == pytest.approx(expected, rel=1e-6)
