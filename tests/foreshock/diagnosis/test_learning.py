"""Tests of learning: what grows with the reward is no warning; what grows without it is; the demo run is healthy."""

from __future__ import annotations

import numpy as np
import pytest

from examples.tiny_rl.record import RECORDED
from foreshock.backtest.readers import read_run
from foreshock.backtest.replay import lost_learning_rate, scales_under_apply
from foreshock.diagnosis.detectors import WarningConfiguration
from foreshock.diagnosis.surge_state import SurgeSettings
from tests.foreshock.diagnosis.curves import LENGTH, closed_steps, noisy, watch

GRADIENT = "scalars:grad_norm"
REWARD = "rollout:reward_mean"


def learning_run(reward_after: float, seed: int = 0) -> dict[str, np.ndarray]:
    """Return a run in which lengths and gradient norm rise at step 60, and the reward goes to `reward_after`."""
    step = np.arange(1, 201)
    rise = 1.0 / (1.0 + np.exp(-(step - 60) / 4.0))
    random = np.random.default_rng(seed)
    return {
        LENGTH: noisy(1000.0 + 2500.0 * rise, 0.05, seed),
        REWARD: 0.3 + (reward_after - 0.3) * rise + 0.02 * random.normal(size=200),
        GRADIENT: noisy(0.4 + 3.0 * rise, 0.1, seed + 1),
    }


def test_demo_run_is_told_nothing_worse_than_that_lengths_grow_with_reward() -> None:
    steps = read_run(RECORDED / "metrics.jsonl")
    state, events = watch(steps)
    assert {event.severity for event in events} == {"info"}
    assert "length_growth_with_reward" in [event.rule for event in events]
    assert state.surge_step is None
    scales = scales_under_apply(steps, WarningConfiguration())
    assert set(scales) == {1.0}
    assert lost_learning_rate(steps, scales) == 0.0


@pytest.mark.parametrize("seed", range(3))
def test_lengths_and_gradient_norm_that_grow_with_the_reward_are_learning(seed: int) -> None:
    steps = closed_steps(learning_run(0.9, seed))
    state, events = watch(steps)
    assert [(event.rule, event.severity, event.moves_learning_rate) for event in events] == [
        ("length_growth_with_reward", "info", False)
    ]
    assert state.surge_step is None
    assert watch(steps[: events[0].step])[0].watching(SurgeSettings()) == "growing_with_reward"


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("reward_after", [0.3, 0.1])
def test_the_same_growth_without_reward_is_a_surge_and_a_warning(reward_after: float, seed: int) -> None:
    state, events = watch(closed_steps(learning_run(reward_after, seed)))
    assert {"length_surge", "gradient_rise"} <= {event.rule for event in events}
    assert state.surge_step is not None


@pytest.mark.parametrize("seed", range(2))
def test_gradient_norm_that_rises_after_learning_is_a_warning_again(seed: int) -> None:
    series = learning_run(0.9, seed)
    series[GRADIENT] = np.r_[series[GRADIENT][:150], 6.0 * series[GRADIENT][150:]]
    _, events = watch(closed_steps(series))
    assert [event.step for event in events if event.rule == "gradient_rise"] == [153]


def test_scale_under_apply_counts_what_a_surge_costs() -> None:
    steps = closed_steps({LENGTH: np.r_[np.full(100, 1000.0), np.full(300, 2100.0)]})
    scales = scales_under_apply(steps, WarningConfiguration())
    # A surge at 101 has a period of 181: halvings at 181 and 362.
    assert [scales[180 - 1], scales[181 - 1], scales[362 - 1]] == [1.0, 0.5, 0.25]
    assert lost_learning_rate(steps, scales) == pytest.approx((181 * 0.5 + 39 * 0.75) / 400)
