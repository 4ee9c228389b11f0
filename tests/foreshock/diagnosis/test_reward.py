"""Tests of the reward detector: a fall is an alert that clears; noise, growth and missing values are not."""

from __future__ import annotations

import json

import numpy as np
import pytest

from foreshock.diagnosis.detectors import WarningConfiguration, WarningState
from foreshock.diagnosis.reward import RewardSettings, RewardState, advance_reward
from tests.foreshock.diagnosis.curves import closed_steps, watch

REWARD = "rollout:reward_mean"


def changes(rewards: np.ndarray, settings: RewardSettings | None = None) -> list[tuple[str, int]]:
    state, events = RewardState(), list[tuple[str, int]]()
    for step, reward in enumerate(rewards, start=1):
        state, new = advance_reward(state, step, float(reward), settings or RewardSettings())
        assert RewardState.from_json(json.loads(json.dumps(state.to_json()))) == state
        events.extend((event.change, event.step) for event in new)
    return events


def noisy(level: np.ndarray, sigma: float, seed: int = 0) -> np.ndarray:
    return np.asarray(level + sigma * np.random.default_rng(seed).normal(size=len(level)))


def test_fall_fires_and_recovery_clears() -> None:
    curve = noisy(np.r_[np.full(40, 0.7), np.full(20, 0.4), np.full(20, 0.72)], 0.02)
    (fired, first), (cleared, last) = changes(curve)
    assert (fired, cleared) == ("fired", "cleared")
    assert 43 <= first <= 46
    assert 63 <= last <= 70


def test_reward_below_zero_falls_from_its_floor_of_minus_one() -> None:
    curve = noisy(np.r_[np.full(30, -0.55), np.full(20, -0.75)], 0.02)
    assert [change for change, _ in changes(curve)] == ["fired"]
    assert changes(curve, RewardSettings(floor=-2.0)) == []


@pytest.mark.parametrize("sigma", [0.01, 0.1, 0.2])
@pytest.mark.parametrize("seed", range(10))
def test_noise_around_a_level_or_a_rise_is_no_fall(sigma: float, seed: int) -> None:
    assert changes(np.clip(noisy(np.full(300, 0.5), sigma, seed), 0.0, 1.0)) == []
    assert changes(np.clip(noisy(np.linspace(0.1, 0.9, 300), sigma, seed), 0.0, 1.0)) == []


def test_missing_rewards_are_skipped() -> None:
    assert advance_reward(RewardState(), 1, None, RewardSettings()) == (RewardState(), ())
    assert advance_reward(RewardState(), 1, float("nan"), RewardSettings()) == (RewardState(), ())


def test_fall_is_an_alert_of_its_own_and_moves_no_learning_rate() -> None:
    curve = noisy(np.r_[np.full(40, 0.7), np.full(20, 0.3)], 0.02)
    state, events = watch(closed_steps({REWARD: curve}))
    assert [event.rule for event in events] == ["reward_fall"]
    assert not events[0].moves_learning_rate
    assert events[0].evidence["best"] == pytest.approx(0.7, abs=0.05)
    assert state.reward.fired_step == events[0].step
    assert WarningState.from_bytes(state.to_bytes()) == state
    assert REWARD in WarningConfiguration().keys
