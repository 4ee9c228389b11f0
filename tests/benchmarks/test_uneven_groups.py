"""The uneven-groups benchmark: its intervals are the product's, and its true means are those of its populations."""

from __future__ import annotations

import math

import numpy as np
import pytest

from benchmarks.uneven_groups import Population, all_intervals, draw, z_probabilities
from foreshock.measures.estimators.bootstrap import bootstrap_interval, nonnegative_intervals
from foreshock.measures.estimators.intervals import clustered_interval


@pytest.mark.parametrize("groups", [8, 32])
def test_intervals_of_many_batches_are_those_of_the_product(groups: int) -> None:
    random = np.random.default_rng(groups)
    tokens = random.integers(5, 500, (6, groups))
    sums = random.lognormal(0.0, 1.3, (6, groups)) * tokens
    found = all_intervals(sums, tokens.astype(np.float64))
    for row in range(6):
        expected = {
            "student": clustered_interval(sums[row], tokens[row]),
            "bootstrap": bootstrap_interval(sums[row], tokens[row]).of_measure("k3_kl"),
            "reported": nonnegative_intervals(sums[row][:, None], tokens[row])[0],
        }
        for kind, interval in expected.items():
            low, high = found[kind]
            assert (low[row], high[row]) == pytest.approx((interval.low, interval.high), rel=1e-9), kind


def test_probabilities_of_prompt_scales_are_those_of_a_normal_deviate() -> None:
    probabilities = z_probabilities()
    assert probabilities.sum() == pytest.approx(1.0, rel=1e-12)
    z = np.arange(-17, 18) / 5.0
    assert probabilities @ np.exp(z) == pytest.approx(math.exp(0.5), rel=5e-3)


def test_batches_sum_the_tokens_of_their_rollouts() -> None:
    population = Population.of(5, True)
    tables = np.stack([population.cumulated_k3(1.0)])
    batches = draw(tables, population.offsets, 3, 4, True, np.random.default_rng(1))
    for index in np.ndindex(3, 4):
        first, rollouts = batches.first[index], batches.rollouts[index]
        d = population.d(slice(population.offsets[first], population.offsets[first + rollouts]), 1.0).astype(float)
        assert batches.tokens[index] == d.size
        assert batches.sums[index] == pytest.approx((np.expm1(d) - d).sum(), rel=1e-8)
