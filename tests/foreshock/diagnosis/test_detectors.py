"""Tests of the detectors' state: it round-trips through JSON bit for bit, and replays from snapshots are identical."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreshock.diagnosis.border import contradiction, largest_k3
from foreshock.diagnosis.default_rules import default_rules
from foreshock.diagnosis.detectors import (
    ClosedStep,
    OpenSignal,
    WarningConfiguration,
    WarningState,
    advance,
    holding_signals,
    stop,
)
from foreshock.diagnosis.lags import LAG_KEY
from foreshock.diagnosis.mismatch_rules import K3
from foreshock.diagnosis.quantities import LARGEST_D_KEY, LEARNING_RATE_KEY, LENGTH_KEY, MEAN_D_KEY, REWARD_KEY
from foreshock.diagnosis.rule import Effect
from tests.foreshock.diagnosis.curves import LENGTH, closed_steps, fired, noisy, watch

CONFIGURATION = WarningConfiguration()
NUMBERS = st.one_of(st.floats(1e-8, 1e4), st.just(0.0), st.just(math.nan), st.just(math.inf), st.just(-1.0))
CLOSED = st.lists(st.dictionaries(st.sampled_from(CONFIGURATION.keys), NUMBERS), max_size=60)


def numbered(rows: list[dict[str, float]], gaps: list[int]) -> list[ClosedStep]:
    steps, step = [], 0
    for index, row in enumerate(rows):
        step += 1 + (gaps[index % len(gaps)] if gaps else 0)
        steps.append(ClosedStep(step, row, rebaseline=index % 17 == 11))
    return steps


@settings(deadline=None, max_examples=30)
@given(CLOSED, st.lists(st.integers(0, 9), max_size=4))
def test_continuing_from_json_at_every_step_is_bit_identical(rows: list[dict[str, float]], gaps: list[int]) -> None:
    straight, through_json = WarningState(), WarningState()
    for closed in numbered(rows, gaps):
        straight, events = advance(straight, closed, CONFIGURATION)
        through_json, same_events = advance(through_json, closed, CONFIGURATION)
        data = through_json.to_bytes()
        through_json = WarningState.from_bytes(data)
        assert through_json.to_bytes() == data == straight.to_bytes()
        assert through_json == straight
        assert [asdict(event) for event in events] == [asdict(event) for event in same_events]
        json.dumps([asdict(event) for event in events], allow_nan=False)


def test_lengths_after_a_rebaseline_are_compared_with_each_other_only() -> None:
    lengths = np.r_[np.full(60, 500.0), np.full(60, 1500.0), np.full(60, 5000.0)]
    steps = closed_steps({LENGTH: noisy(lengths, 0.05)})
    _, events = watch(steps)
    assert [step for rule, step in fired(events) if rule == "length_surge"] == [64]
    announced = [replace(closed, rebaseline=closed.step == 61) for closed in steps]
    state, events = watch(announced)
    assert [step for rule, step in fired(events) if rule == "length_surge"] == [124]
    assert state.surge_step == 121


def test_rebaseline_keeps_a_confirmed_surge_and_a_firing_rule() -> None:
    series = {LENGTH: np.r_[np.full(60, 500.0), np.full(40, 1500.0)], K3: np.full(100, 5e-2)}
    steps = [replace(closed, rebaseline=closed.step == 90) for closed in closed_steps(series)]
    state, _ = watch(steps)
    assert state.surge_step == 61
    firing = [rule.name for rule in CONFIGURATION.rules if state.rules.firing(rule) is not None]
    assert "mismatch_critical" in firing


def test_rule_relative_to_the_baseline_does_not_fire_for_a_level_that_was_announced() -> None:
    values = np.r_[np.full(40, 5e-4), np.full(40, 4e-3)]
    steps = closed_steps({K3: values})
    relative = {rule.name for rule in CONFIGURATION.rules if rule.relative is not None and rule.key == K3}
    _, events = watch(steps)
    assert relative & {rule for rule, _ in fired(events)}
    _, events = watch(replace(closed, rebaseline=closed.step == 41) for closed in steps)
    assert not relative & {rule for rule, _ in fired(events)}


def test_step_out_of_order_is_refused() -> None:
    state, _ = advance(WarningState(), ClosedStep(5, {LENGTH: 100.0}), CONFIGURATION)
    for step in (5, 4):
        with pytest.raises(ValueError, match="steps must ascend"):
            advance(state, ClosedStep(step, {LENGTH: 100.0}), CONFIGURATION)


def test_effects_of_firing_rules_on_the_learning_rate() -> None:
    k3 = np.r_[np.full(30, 5e-4), np.full(10, 0.2), np.full(10, 5e-4)]
    steps = closed_steps({K3: k3, LAG_KEY: np.zeros(50)})

    def configured(effect: Effect) -> WarningConfiguration:
        rules = [replace(each, effect=effect) if each.name == "mismatch_runaway" else each for each in default_rules()]
        return WarningConfiguration(rules=tuple(rules))

    holding = configured("hold")
    state, _ = watch(steps[:35], holding)
    assert holding_signals(state, holding) == (OpenSignal("mismatch_runaway", 35),)
    state, _ = watch(steps, holding)
    assert holding_signals(state, holding) == ()
    # At lag 0 the loop leaves the mismatch alone, unless a rule asks it to lower the rate.
    assert watch(steps[:40])[0].loop.log_scale == 0.0
    assert watch(steps[:40], configured("halve"))[0].loop.log_scale < 0.0


def test_state_stays_small_however_long_the_run() -> None:
    step = np.arange(1, 601)
    state, _ = watch(closed_steps({LENGTH: 1000.0 + step % 7, K3: np.full(600, 1e-4)}))
    assert len(state.to_bytes()) < 12_000


def test_sum_of_the_learning_rate_does_not_depend_on_how_steps_are_grouped() -> None:
    rates = [ClosedStep(step, {"scalars:lr": 1e-6 / 3}) for step in range(1, 101)]
    whole, _ = watch(rates)
    gaps, _ = watch([each for each in rates if each.step % 7 == 1 or each.step == 100])
    assert whole.learning_rate_sum == gaps.learning_rate_sum == pytest.approx(100e-6 / 3)


def test_state_forgets_a_late_value_in_the_middle_of_a_healthy_run() -> None:
    random = np.random.default_rng(5)
    values = [
        ClosedStep(step, {LENGTH: float(1000.0 * np.exp(0.1 * noise)), "scalars:lr": 1e-6})
        for step, noise in enumerate(random.normal(size=600), start=1)
    ]
    whole, _ = watch(values)
    missing, _ = watch([each for each in values if each.step != 200])
    assert missing.to_bytes() == whole.to_bytes()


EXTREMES = (1e300, -1e300, 1e30, 5e-324, 1e-300, -1.0, 0.0, math.inf, -math.inf, math.nan)
KEYS = sorted(CONFIGURATION.keys)


@settings(max_examples=30, deadline=None)
@given(
    st.lists(
        st.dictionaries(st.sampled_from(KEYS), st.sampled_from(EXTREMES) | st.floats(), max_size=8),
        min_size=1,
        max_size=40,
    )
)
def test_no_float_stops_the_detectors(rows: list[dict[str, float]]) -> None:
    state = WarningState()
    for step, values in enumerate(rows):
        state, events = advance(state, ClosedStep(step, values), CONFIGURATION)
        for event in events:
            json.dumps([event.value, event.threshold, dict(event.evidence)], allow_nan=False)
    assert WarningState.from_bytes(state.to_bytes()) == state


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (REWARD_KEY, 1e300),
        (REWARD_KEY, math.inf),
        (LENGTH_KEY, -3.0),
        (LEARNING_RATE_KEY, -1e-6),
        ("scalars:grad_norm", math.nan),
    ],
)
def test_extreme_value_is_named_once_and_clears(key: str, value: float) -> None:
    _, events = watch(closed_steps({key: [1.0, value, value, *[1.0] * 6]}))
    (found, cleared) = (event for event in events if event.rule == "value_refused")
    assert (found.step, found.evidence["key"], found.evidence["logged"]) == (2, key, f"{value:g}")
    assert (cleared.change, cleared.fired_step, cleared.step) == ("cleared", 2, 8)


def test_extreme_value_changes_nothing_else() -> None:
    rewards = [0.5, 0.52, 0.48, 0.51] * 10
    usual, _ = watch(closed_steps({REWARD_KEY: rewards}, range(40)))
    steps = closed_steps({REWARD_KEY: rewards}, range(40))
    steps.insert(20, ClosedStep(19, {REWARD_KEY: 1e300}))
    shifted = [ClosedStep(number, each.values) for number, each in enumerate(steps)]
    state, events = watch(shifted)
    assert fired(events) == [("value_refused", 20)]
    assert state.reward.values == usual.reward.values


@given(st.lists(st.floats(-30.0, 30.0), min_size=1, max_size=30), st.sampled_from([(), (MEAN_D_KEY,)]))
def test_k3_of_tokens_never_contradicts_their_differences(d: list[float], unlogged: tuple[str, ...]) -> None:
    k3, size = float(np.mean(np.expm1(d) - d)), np.abs(d)
    values = {K3: k3, MEAN_D_KEY: float(size.mean()), LARGEST_D_KEY: float(size.max())}
    logged = {key: value for key, value in values.items() if key not in unlogged}
    assert k3 <= largest_k3(logged) * (1 + 1e-9) + 1e-12
    assert not contradiction(logged)


@pytest.mark.parametrize(("k3", "is_possible"), [(4e-4, True), (2e-3, True), (0.02, False), (2.3, False)])
def test_k3_that_the_logged_differences_exclude_is_told_and_not_judged(k3: float, is_possible: bool) -> None:
    series = {K3: [k3] * 30, MEAN_D_KEY: [4e-3] * 30, LARGEST_D_KEY: [0.3] * 30}
    state, events = watch(closed_steps(series))
    refused = [event for event in events if event.rule == "value_refused"]
    assert bool(refused) != is_possible
    if not is_possible:
        assert fired(events) == [("value_refused", 1)]
        assert "|d|, 4.0e-3 and 0.30, with which k3 is at most 6.6e-4. It is stored" in refused[0].why
        assert K3 not in state.rules.baselines


@pytest.mark.parametrize("other", [{}, {LARGEST_D_KEY: [0.3] * 30, "trainer/rollout:min_d": [-0.3] * 30}])
def test_k3_without_the_largest_difference_and_measured_k3_are_judged(other: dict[str, list[float]]) -> None:
    _, events = watch(closed_steps({K3: [2.3] * 30, MEAN_D_KEY: [4e-3] * 30, **other}))
    assert "mismatch_critical" in [rule for rule, _ in fired(events)]


def test_missing_value_is_not_named() -> None:
    _, events = watch([ClosedStep(0, {REWARD_KEY: math.nan})])
    assert events == []


def test_stopped_detection_says_so_and_detects_nothing_more() -> None:
    state, (event,) = stop(WarningState(), 3, ZeroDivisionError("division by zero"))
    assert (event.rule, event.severity) == ("detection_stopped", "warning")
    assert event.why.startswith("Detection stopped at step 3: ZeroDivisionError: division by zero.")
    assert WarningState.from_bytes(state.to_bytes()) == state
    state, events = advance(state, ClosedStep(4, {REWARD_KEY: 1e300}), CONFIGURATION)
    assert (state.step, events) == (4, ())
