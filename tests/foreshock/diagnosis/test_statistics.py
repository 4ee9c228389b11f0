"""Tests of the noise estimate and of the evidence: known noise is recovered, and false alarms keep their bound."""

from __future__ import annotations

import math

import numpy as np
import pytest

from benchmarks.diagnosis.curves import noise_of
from foreshock.diagnosis.statistics import (
    Noise,
    autocorrelated_noise,
    bend_of,
    log_evidence,
    onset_of,
    residuals_above,
    swing_about_peak,
)


@pytest.mark.parametrize("autocorrelation", [0.0, 0.5, 0.9])
def test_estimate_is_rarely_below_the_noise_and_not_far_above_it(autocorrelation: float) -> None:
    estimates = [
        autocorrelated_noise([list(noise_of(0.2, autocorrelation, 100, np.random.default_rng(seed)))])
        for seed in range(60)
    ]
    assert np.mean([noise.autocorrelation >= autocorrelation - 0.05 for noise in estimates]) > 0.85
    innovation = 0.2 * math.sqrt(1.0 - autocorrelation**2)
    assert 0.9 * innovation < np.median([noise.innovation for noise in estimates]) < 1.35 * innovation


def test_outliers_and_trends_hardly_change_the_estimate() -> None:
    values = noise_of(0.1, 0.3, 100, np.random.default_rng(0))
    plain = autocorrelated_noise([list(values)])
    values[[20, 50, 80]] += 2.0
    changed = autocorrelated_noise([list(values + 0.01 * np.arange(100))])
    assert changed.innovation < 1.5 * plain.innovation
    assert abs(changed.autocorrelation - plain.autocorrelation) < 0.25


def test_too_few_values_are_as_noisy_as_a_random_walk() -> None:
    assert autocorrelated_noise([[1.0, 2.0]], least=0.03) == Noise(0.98, 0.03, 2)


def test_levels_of_segments_do_not_count_as_noise() -> None:
    random = np.random.default_rng(1)
    low, high = list(0.1 * random.normal(size=40)), list(5.0 + 0.1 * random.normal(size=40))
    assert autocorrelated_noise([low, high]).innovation < 0.2


def test_evidence_has_expectation_of_at_most_the_number_of_observations() -> None:
    random = np.random.default_rng(2)
    evidence = [math.exp(log_evidence(list(random.normal(size=20)))) for _ in range(4000)]
    # The capped residuals make it smaller. The mean of heavy tails is known to a few tenths.
    assert np.mean(evidence) < 24.0
    assert np.mean(np.array(evidence) > 20 / 0.01) <= 0.01


def test_shift_gives_evidence_and_its_onset() -> None:
    random = np.random.default_rng(3)
    values = np.r_[random.normal(size=30), 2.0 + random.normal(size=15)]
    assert log_evidence(list(values)) > math.log(1e5)
    onset = onset_of(list(values))
    assert onset.first <= onset.index <= onset.last
    assert abs(onset.index - 30) <= 3
    assert log_evidence([]) == -math.inf


def test_residuals_are_prewhitened_and_allow_for_the_baseline() -> None:
    noise = Noise(0.5, 0.1, 50)
    assert residuals_above([1.0, 1.2, 1.2], 1.0, 25, noise) == pytest.approx([2.0 - 0.2, 1.0 - 0.2])


@pytest.mark.parametrize("bend", [3, 5, 8])
def test_the_bend_of_a_line_and_its_level_are_found(bend: int) -> None:
    values = [1.0 - 0.2 * max(place - bend + 1, 0) for place in range(9)]
    for sign in (1.0, -1.0):
        found, level = bend_of([sign * each for each in values], 3)
        assert found == bend
        assert level == pytest.approx(sign)


def test_a_curve_that_rises_and_falls_leaves_only_what_swings() -> None:
    assert swing_about_peak([1.0, 2.0, 4.0, 4.5, 1.0, 0.5], 3) == 0.0
    assert swing_about_peak([4.0, 3.0, 1.0], 0) == 0.0
    assert swing_about_peak([1.0, 3.0, 4.0], 2) == 0.0
    # Two pools of two values, each 0.5 from its mean, of six values.
    assert swing_about_peak([2.0, 1.0, 5.0, 6.0, 3.0, 4.0], 3) == pytest.approx(math.sqrt(4 * 0.25 / 6))
