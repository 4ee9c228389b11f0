"""Known traps of mismatch measures, each shown by a sample."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from foreshock.measures import ComparisonStatistics


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
