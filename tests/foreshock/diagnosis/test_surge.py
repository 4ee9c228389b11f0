"""Tests of the surge detector: it finds the published shape, prefers early, and ignores noise and ramps."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.diagnosis.curves import noise_of
from foreshock.diagnosis.surge_state import SurgeSettings
from tests.foreshock.diagnosis.curves import LENGTH, closed_steps, fired, noisy, surge_curve, watch

SETTINGS = SurgeSettings()
REWARD = "rollout:reward_mean"
LONGEST = "rollout:response_length_max"
TRUNCATED = "rollout:truncated_fraction"


@pytest.mark.parametrize("width", [3.0, 6.0, 10.0])
@pytest.mark.parametrize("sigma", [0.02, 0.1, 0.2])
@pytest.mark.parametrize("seed", [0])
def test_finds_the_published_surge_near_110(width: float, sigma: float, seed: int) -> None:
    curve = noisy(surge_curve(110, width), sigma, seed)
    state, events = watch(closed_steps({LENGTH: curve}))
    surges = [event for event in events if event.rule == "length_surge"]
    assert len(surges) == 1
    assert state.surge_step is not None
    # With noise (0.2) a surge is detected early; an early detection only slows the run.
    assert 80 <= state.surge_step <= 120
    assert surges[0].moves_learning_rate
    assert surges[0].evidence["surge_step"] == state.surge_step
    assert state.surge_step < surges[0].step <= 110 + 30


@pytest.mark.parametrize(("over", "sigma"), [(80, 0.1), (100, 0.02), (200, 0.1), (400, 0.02)])
def test_slow_ramp_is_an_event_without_effect_on_the_learning_rate(over: int, sigma: float) -> None:
    step = np.arange(1, over + 200)
    curve = noisy(1000.0 + 2000.0 * np.minimum(step / over, 1.0), sigma)
    state, events = watch(closed_steps({LENGTH: curve}))
    assert state.surge_step is None
    assert {event.rule for event in events} == {"length_ramp"}
    assert not any(event.moves_learning_rate for event in events)


def test_single_outliers_are_no_surge() -> None:
    curve = noisy(np.full(200, 600.0), 0.1)
    curve[[30, 60, 61, 120]] *= 5.5
    state, _ = watch(closed_steps({LENGTH: curve}))
    assert state.surge_step is None


def test_return_to_earlier_lengths_is_no_surge() -> None:
    curve = np.r_[np.full(60, 700.0), np.full(60, 30.0), np.full(60, 160.0)]
    state, events = watch(closed_steps({LENGTH: curve}))
    assert state.surge_step is None
    assert not [event for event in events if event.rule.startswith("length_surge")]


def early_curve() -> np.ndarray:
    return np.concatenate([np.full(9, 900.0), np.full(80, 2040.0)])


def test_very_early_surge_alone_does_not_move_the_learning_rate() -> None:
    state, events = watch(closed_steps({LENGTH: early_curve()}))
    assert ("length_surge_early", 13) in fired(events)
    assert state.surge_step is None
    assert not any(event.moves_learning_rate for event in events)


@pytest.mark.parametrize("signal", ["scalars:grad_norm", "trainer/rollout:k3_kl"])
def test_very_early_surge_counts_once_corroborated(signal: str) -> None:
    # The rule on k3 pools steps: five of sixty times the baseline are as much evidence as many of eight times.
    level, rise = (0.4, 8.0) if signal == "scalars:grad_norm" else (1e-4, 60.0)
    other = np.r_[np.full(29, level), np.full(60, rise * level)]
    state, events = watch(closed_steps({LENGTH: early_curve(), signal: other}))
    assert state.surge_step == 10
    moving = [event for event in events if event.moves_learning_rate]
    assert [event.rule for event in moving] == ["length_surge"]
    assert moving[0].step in (32, 34)
    assert moving[0].evidence["decay_period"] == 45


def test_late_corroboration_has_no_effect() -> None:
    gradient = np.r_[np.full(70, 0.4), np.full(19, 4.0)]
    state, _ = watch(closed_steps({LENGTH: early_curve(), "scalars:grad_norm": gradient}))
    assert state.surge_step is None


def test_uncorroborated_early_surge_does_not_hide_a_later_one() -> None:
    curve = np.r_[early_curve(), np.full(60, 2040.0), np.full(40, 6000.0)]
    state, _ = watch(closed_steps({LENGTH: curve}))
    assert state.surge_step == 150


def test_second_surge_is_reported_and_the_schedule_keeps_the_first() -> None:
    curve = np.r_[np.full(100, 1000.0), np.full(100, 2500.0), np.full(60, 6000.0)]
    state, events = watch(closed_steps({LENGTH: curve}))
    assert state.surge_step == 101
    assert fired(events) == [("length_surge", 104), ("length_surge_again", 204)]
    assert [event.moves_learning_rate for event in events] == [True, False]


def test_missing_steps_and_missing_values_change_little() -> None:
    curve = noisy(surge_curve(110, 6.0), 0.1)
    kept = [step for step in range(1, 301) if step % 10 and step % 7]
    holes = {LENGTH: [curve[step - 1] if step % 4 else float("nan") for step in kept]}
    state, _ = watch(closed_steps(holes, kept))
    assert state.surge_step is not None
    assert 100 <= state.surge_step <= 120


def test_run_logged_every_fifth_step_surges_at_its_step_number() -> None:
    steps = list(range(5, 601, 5))
    curve = [surge_curve(300, 5.0, steps=600)[step - 1] for step in steps]
    state, _ = watch(closed_steps({LENGTH: curve}, steps))
    assert state.surge_step is not None
    assert 285 <= state.surge_step <= 320


@settings(deadline=None, max_examples=5)
@given(st.floats(1.0, 50.0), st.integers(0, 5))
def test_only_ratios_of_lengths_matter(factor: float, seed: int) -> None:
    curve = noisy(surge_curve(60, 5.0, steps=120), 0.1, seed)
    plain, _ = watch(closed_steps({LENGTH: curve}))
    scaled, _ = watch(closed_steps({LENGTH: factor * curve}))
    assert plain.surge_step is not None
    assert scaled.surge_step == plain.surge_step


def test_surge_needs_a_baseline() -> None:
    state, events = watch(closed_steps({LENGTH: [1000.0, 1000.0, 5000.0, 5000.0]}))
    assert state.watching(SETTINGS) == "warming"
    assert events == []
    state, _ = watch(closed_steps({LENGTH: [1000.0] * 5}))
    assert state.watching(SETTINGS) == "watching"


def test_run_without_lengths_is_not_warming_for_ever() -> None:
    state, _ = watch(closed_steps({"scalars:grad_norm": [0.4] * 30}))
    assert state.watching(SETTINGS) == "no_lengths"
    state, _ = watch(closed_steps({LENGTH: [1000.0, float("nan"), float("nan")] * 3}))
    assert state.watching(SETTINGS) == "warming"
    state, _ = watch(closed_steps({LENGTH: noisy(np.full(12, 500.0), 0.8)}))
    assert state.watching(SETTINGS) == "watching"


def test_surge_reports_onset_interval_confirmation_and_confidence() -> None:
    curve = noisy(np.r_[np.full(100, 1000.0), np.full(20, 3000.0)], 0.1)
    _, events = watch(closed_steps({LENGTH: curve, "scalars:lr": np.full(120, 1e-6)}))
    evidence = events[0].evidence
    assert evidence["onset_first"] <= evidence["onset_step"] <= evidence["onset_last"]  # type: ignore[operator]
    assert evidence["onset_step"] == evidence["surge_step"] == 101
    assert evidence["confirmation_step"] == events[0].step == 104
    assert 0.999 < float(evidence["confidence"]) <= 1.0
    assert evidence["learning_rate_sum_at_surge"] == pytest.approx(101e-6)
    assert evidence["learning_rate_sum_of_period"] == pytest.approx(1.8 * 101e-6)


@pytest.mark.parametrize("earlier", [2500.0, 2200.0])
def test_high_water_mark_is_the_guard_not_half_of_it(earlier: float) -> None:
    curve = noisy(np.r_[np.full(60, earlier), np.full(60, 900.0), np.full(250, 2000.0)], 0.05)
    _, events = watch(closed_steps({LENGTH: np.r_[curve, noisy(np.full(60, 4500.0), 0.05)]}))
    ((rule, step),) = fired(events)
    assert rule == "length_surge"
    assert step > curve.size


def test_growth_with_reward_becomes_a_surge_once_the_reward_falls() -> None:
    curve = noisy(surge_curve(110, 4.0, steps=200), 0.05)
    reward = 0.3 + 0.5 / (1.0 + np.exp(-(np.arange(1, 201) - 105) / 4.0)) + 0.01 * np.sin(np.arange(200))
    reward[135:] = 0.35
    state, events = watch(closed_steps({LENGTH: curve, REWARD: reward}))
    assert [rule for rule, _ in fired(events)] == [
        "length_growth_with_reward",
        "reward_fall",
        "length_surge",
        "reward_collapse",
    ]
    assert state.surge_step is not None
    assert 95 <= state.surge_step <= 113


def test_lengths_at_the_cap_disarm_the_detector_and_do_not_become_its_baseline() -> None:
    cap = {LONGEST: [1000.0] * 80, TRUNCATED: [0.8] * 80}
    state, events = watch(closed_steps({LENGTH: [950.0] * 80, **cap}))
    assert state.watching(SETTINGS) == "at_cap"
    assert not state.armed(SETTINGS)
    assert not [rule for rule, _ in fired(events) if rule.startswith("length")]


def test_jump_to_the_cap_is_a_surge() -> None:
    series = {
        LENGTH: np.r_[np.full(60, 1000.0), np.full(20, 3900.0)],
        LONGEST: np.r_[np.full(60, 2500.0), np.full(20, 4096.0)],
        TRUNCATED: np.r_[np.zeros(60), np.full(20, 0.9)],
    }
    state, events = watch(closed_steps(series))
    assert state.surge_step == 61
    assert events[0].evidence["truncated_fraction"] == 0.9


@pytest.mark.parametrize(("sigma", "autocorrelation"), [(0.05, 0.0), (0.5, 0.0), (0.2, 0.6), (0.2, 0.9)])
@pytest.mark.parametrize("seed", range(2))
def test_noise_is_no_surge_also_if_it_is_autocorrelated(sigma: float, autocorrelation: float, seed: int) -> None:
    noise = noise_of(sigma, autocorrelation, 300, np.random.default_rng(seed))
    state, events = watch(closed_steps({LENGTH: 800.0 * np.exp(noise)}))
    assert state.surge_step is None
    assert not [event for event in events if event.rule.startswith("length_surge")]


@pytest.mark.parametrize("length", [0.0, 0.4, float("nan"), float("inf"), -1.0])
def test_invalid_lengths_are_ignored(length: float) -> None:
    state, events = watch(closed_steps({LENGTH: [1000.0] * 30 + [length] + [1000.0] * 30}))
    assert state.surge_step is None
    assert not [event for event in events if event.rule.startswith("length_surge")]
