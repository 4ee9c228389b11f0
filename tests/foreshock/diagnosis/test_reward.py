"""Tests of the reward detectors: a collapse is found whatever its shape; noise and growth are none."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreshock.diagnosis.collapse import collapse_step
from foreshock.diagnosis.detectors import WarningConfiguration, WarningState
from foreshock.diagnosis.reward import RewardSettings, RewardState, advance_reward
from tests.foreshock.diagnosis.curves import closed_steps, watch

REWARD = "rollout:reward_mean"
K3 = "trainer/rollout:k3_kl"


def changes(
    rewards: np.ndarray, settings: RewardSettings | None = None, rule: str = "reward_collapse"
) -> list[tuple[str, int]]:
    state, events = RewardState(), list[tuple[str, int]]()
    for step, reward in enumerate(rewards, start=1):
        state, new = advance_reward(state, step, float(reward), settings or RewardSettings())
        assert RewardState.from_json(json.loads(json.dumps(state.to_json()))) == state
        events.extend((event.change, event.step) for event in new if event.rule == rule)
    return events


def noisy(level: np.ndarray, sigma: float, seed: int = 0) -> np.ndarray:
    return np.asarray(level + sigma * np.random.default_rng(seed).normal(size=len(level)))


def rollouts(level: np.ndarray, count: int, seed: int = 0) -> np.ndarray:
    return np.asarray(np.random.default_rng(seed).binomial(count, level) / count)


def test_fall_by_less_than_half_is_a_warning_that_clears() -> None:
    curve = noisy(np.r_[np.full(40, 0.7), np.full(20, 0.45), np.full(20, 0.72)], 0.02)
    assert changes(curve) == []
    (fired, first), (cleared, last) = changes(curve, rule="reward_fall")
    assert (fired, cleared) == ("fired", "cleared")
    assert 43 <= first <= 46
    assert 63 <= last <= 70


@pytest.mark.parametrize("over", [1, 10, 30, 60, 120])
@pytest.mark.parametrize("count", [64, 1024])
def test_ramp_is_found_before_two_thirds_of_the_fall(over: int, count: int) -> None:
    level = np.r_[np.full(60, 0.85), np.linspace(0.85, 0.03, over + 1)[1:], np.full(20, 0.03)]
    ((change, step),) = changes(rollouts(level, count))
    assert change == "fired"
    assert step > 60
    assert step <= 63 or level[step - 1] > 0.85 - 0.82 * 2 / 3


def test_dip_is_no_reason_to_miss_the_collapse_after_it() -> None:
    level = np.r_[np.full(40, 0.8), np.full(8, 0.2), np.full(40, 0.8), np.full(20, 0.05)]
    assert [change for change, _ in changes(rollouts(level, 256))] == ["fired", "cleared", "fired"]


def test_collapse_late_in_a_run_that_learned() -> None:
    level = np.r_[np.linspace(0.2, 0.8, 300), np.full(700, 0.8), np.linspace(0.8, 0.1, 40), np.full(20, 0.1)]
    ((change, step),) = changes(rollouts(level, 128))
    assert change == "fired"
    assert 1000 < step < 1030


@pytest.mark.parametrize(("scale", "shift"), [(1.0, -1.0), (2.0, -1.0), (100.0, -150.0), (12.0, 0.0)])
def test_rewards_of_other_scales_and_signs_collapse(scale: float, shift: float) -> None:
    level = np.r_[np.linspace(0.2, 0.8, 60), np.full(60, 0.8), np.linspace(0.8, 0.05, 30), np.full(20, 0.05)]
    ((change, step),) = changes(scale * rollouts(level, 256) + shift)
    assert change == "fired"
    assert 125 < step < 150


def test_collapse_by_the_definition_in_noise_is_found_when_the_definition_has_held() -> None:
    curve = np.clip(noisy(np.r_[np.full(60, 0.4), np.full(30, 0.12)], 0.1, 3), 0.0, 1.0)
    label = collapse_step(list(range(1, 91)), list(map(float, curve)), 0.0)
    assert label is not None
    ((change, step),) = changes(curve)
    assert change == "fired"
    assert step <= label + 10


@pytest.mark.parametrize("sigma", [0.01, 0.1])
@pytest.mark.parametrize("seed", range(5))
def test_noise_around_a_level_or_a_rise_is_no_collapse(sigma: float, seed: int) -> None:
    assert changes(np.clip(noisy(np.full(300, 0.5), sigma, seed), 0.0, 1.0)) == []
    assert changes(np.clip(noisy(np.linspace(0.1, 0.9, 300), sigma, seed), 0.0, 1.0)) == []


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("start", [0.2, -0.02])
def test_rewards_just_below_zero_neither_hide_nor_end_a_collapse(start: float, seed: int) -> None:
    level = np.r_[np.linspace(start, 0.7, 40), np.linspace(0.7, 0.05, 6), np.linspace(0.05, 0.0, 30)]
    assert [change for change, _ in changes(noisy(level, 0.02, seed))] == ["fired"]


@given(after=st.lists(st.floats(-5.0, 0.2), min_size=1, max_size=30), low=st.floats(-5.0, 0.0))
def test_lower_rewards_never_end_a_collapse(after: list[float], low: float) -> None:
    curve = np.r_[noisy(np.full(30, 0.7), 0.02), np.full(8, 0.05), after, np.full(10, low)]
    assert [change for change, _ in changes(curve)] == ["fired"]


def test_missing_rewards_are_skipped() -> None:
    assert advance_reward(RewardState(), 1, None, RewardSettings()) == (RewardState(), ())
    assert advance_reward(RewardState(), 1, float("nan"), RewardSettings()) == (RewardState(), ())


def test_collapse_supersedes_no_rate_and_names_what_came_first() -> None:
    level = np.r_[np.full(60, 0.7), np.linspace(0.7, 0.05, 20), np.full(10, 0.05)]
    k3 = np.r_[np.full(50, 1e-4), np.full(40, 3e-3)] * np.exp(noisy(np.zeros(90), 0.1, 1))
    state, events = watch(closed_steps({REWARD: rollouts(level, 256), K3: k3}))
    fired = {event.rule: event for event in events}
    assert {"reward_fall", "reward_collapse"} <= set(fired)
    collapse = fired["reward_collapse"]
    assert collapse.severity == "critical"
    assert not collapse.moves_learning_rate
    assert abs(int(collapse.evidence["onset_step"]) - 61) <= 3
    assert collapse.evidence["first"] == "mismatch"
    assert abs(int(collapse.evidence["k3_onset_step"]) - 51) <= 1
    assert "the mismatch rose first, from step 5" in collapse.why
    assert state.reward.collapse_step == collapse.step
    assert WarningState.from_bytes(state.to_bytes()) == state
    assert REWARD in WarningConfiguration().keys


def test_order_is_unknown_without_a_mismatch_before_the_fall() -> None:
    level = np.r_[np.full(40, 0.7), np.full(10, 0.05)]
    _, events = watch(closed_steps({REWARD: rollouts(level, 256)}))
    collapse = next(event for event in events if event.rule == "reward_collapse")
    assert collapse.evidence["first"] == "not logged"
    assert "the mismatch was not logged" in collapse.why


def test_a_mismatch_of_exactly_zero_tells_nothing_of_which_came_first() -> None:
    level = np.r_[np.full(60, 0.7), np.full(10, 0.05)]
    _, events = watch(closed_steps({REWARD: rollouts(level, 256), K3: np.zeros(70)}))
    collapse = next(event for event in events if event.rule == "reward_collapse")
    assert collapse.evidence["first"] == "zero"
    assert "k3 is exactly 0 in all steps" in collapse.why
    assert "risen" not in collapse.why + collapse.what_to_do


def test_the_order_is_said_as_of_the_step_of_the_alert() -> None:
    level = np.r_[np.full(60, 0.7), np.full(10, 0.05)]
    k3 = 1e-4 * np.exp(noisy(np.zeros(70), 0.1, 1))
    _, events = watch(closed_steps({REWARD: rollouts(level, 256), K3: k3}))
    collapse = next(event for event in events if event.rule == "reward_collapse")
    assert f"the mismatch had not risen by step {collapse.step}" in collapse.why


@pytest.mark.parametrize("seed", range(5))
def test_a_share_of_the_fall_is_claimed_only_if_the_reward_is_there(seed: int) -> None:
    level = np.r_[np.full(60, 0.8), np.linspace(0.8, 0.02, 10), np.full(10, 0.02)]
    _, events = watch(closed_steps({REWARD: rollouts(level, 64, seed)}))
    for event in events:
        if event.change == "fired":
            is_there = event.value < event.threshold
            assert ("By then more than" in event.why) == is_there
            assert ("it is within two steps more than" in event.why) == (not is_there)


def test_an_announced_change_does_not_end_a_collapse_that_goes_on() -> None:
    curve = noisy(np.r_[np.full(60, 0.8), np.full(60, 0.1), np.full(10, 0.8)], 0.02)
    steps = [replace(each, rebaseline=each.step == 90) for each in closed_steps({REWARD: curve})]
    _, events = watch(steps)
    ends = [event.step for event in events if event.rule == "reward_collapse" and event.change == "cleared"]
    assert len(ends) == 1
    assert 121 <= ends[0] <= 125


def warned(per_entropy: float | None, settings: RewardSettings | None = None) -> list[int]:
    """Return the steps at which a reward that swings widely and sinks slowly is a warning."""
    level = np.r_[np.full(40, 0.6), np.linspace(0.6, 0.3, 60)]
    state, events = RewardState(), list[int]()
    for step, reward in enumerate(noisy(level, 0.09, seed=3), start=1):
        state, new = advance_reward(state, step, float(reward), settings or RewardSettings(), per_entropy=per_entropy)
        events.extend(event.step for event in new if event.rule == "reward_fall" and event.change == "fired")
    return events


def test_a_fall_of_the_average_beside_a_critical_mismatch_is_a_warning_that_comes_earlier() -> None:
    with_mismatch, without = warned(per_entropy=0.5), warned(per_entropy=0.01)
    assert with_mismatch
    assert not without or with_mismatch[0] < without[0]
    assert warned(per_entropy=None) == warned(per_entropy=float("nan")) == without


def test_a_mixture_of_experts_has_its_own_range_of_the_mismatch_beside_the_entropy() -> None:
    assert RewardSettings.for_model("moe").per_entropy > RewardSettings.for_model("dense").per_entropy
    assert warned(per_entropy=0.5, settings=RewardSettings.for_model("moe")) == warned(per_entropy=None)


def slow_falls(rewards: np.ndarray) -> list[tuple[str, int]]:
    return changes(rewards, rule="reward_fall")


@pytest.mark.parametrize("over", [250, 1000])
@pytest.mark.parametrize("risen", [0, 300])
def test_fall_over_more_rewards_than_are_kept_is_a_warning_from_its_bend_on(over: int, risen: int) -> None:
    level = np.r_[np.linspace(0.3, 0.65, risen), np.full(100, 0.65), np.linspace(0.65, 0.4, over)]
    state, events = watch(closed_steps({REWARD: rollouts(level, 256), K3: np.full(len(level), 3e-4)}))
    (fall,) = [each for each in events if each.rule == "reward_fall"]
    assert fall.severity == "warning"
    assert risen + 100 - 0.05 * len(level) <= int(fall.evidence["onset_step"]) <= risen + 100 + 0.2 * over
    assert float(fall.evidence["before"]) == pytest.approx(0.65, abs=0.03)
    assert fall.evidence["first"] in (("no rise",) if risen else ("no rise", "unknown"))
    assert "by task" in fall.what_to_do
    assert state.reward.is_low
    assert not state.reward.lowers_rate


def test_slow_fall_clears_when_the_level_is_back() -> None:
    level = np.r_[np.full(200, 0.6), np.linspace(0.6, 0.38, 400), np.linspace(0.38, 0.6, 200), np.full(100, 0.6)]
    (fired, first), (cleared, last) = slow_falls(rollouts(level, 256))
    assert (fired, cleared) == ("fired", "cleared")
    assert 400 < first < 620
    assert 730 < last < 880


@pytest.mark.parametrize("seed", range(3))
def test_slow_waves_and_a_small_slow_fall_are_no_warning(seed: int) -> None:
    step = np.arange(1000)
    assert slow_falls(rollouts(0.5 + 0.05 * np.sin(step / 40.0), 64, seed)) == []
    assert slow_falls(rollouts(0.6 - 0.09 * step / 1000, 64, seed)) == []


def test_an_announced_change_begins_the_long_levels_again() -> None:
    level = np.r_[np.full(300, 0.7), np.full(300, 0.4)]
    steps = closed_steps({REWARD: rollouts(level, 256)})
    _, events = watch([replace(each, rebaseline=each.step == 301) for each in steps])
    assert [each.rule for each in events if each.rule.startswith("reward")] == []


@pytest.mark.parametrize("seed", range(4))
def test_rare_rewards_of_few_rollouts_do_not_collapse_by_chance(seed: int) -> None:
    curve = rollouts(np.full(1500, 0.1), 16, seed)
    assert [step for change, step in changes(curve) if step > 300] == []


@pytest.mark.parametrize("seed", range(3))
def test_a_reward_that_recovered_and_swings_again_is_no_second_collapse(seed: int) -> None:
    """Prompts of other difficulty make waves that the definition alone calls a collapse each time."""
    places = np.arange(200)
    wave = np.clip(noisy(0.36 + 0.12 * np.sin(places / 6.0), 0.15, seed), 0.0, 1.0)
    assert sum(change == "fired" for change, _ in changes(wave)) <= 1
    ended = np.r_[wave[:150], np.clip(noisy(np.full(40, 0.02), 0.02, seed), 0.0, 1.0)]
    assert changes(ended)[-1][0] == "fired"
