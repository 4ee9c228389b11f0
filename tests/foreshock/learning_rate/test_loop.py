"""The law of the control loop: what counts as driven, where the scale goes, and what bad input does to it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreshock.backtest.replay import AppliedAdvice
from foreshock.diagnosis.detectors import ClosedStep, WarningConfiguration
from foreshock.learning_rate.decisions import Decision, Observation, decide, fold, next_point
from foreshock.learning_rate.loop import (
    BASELINE_READINGS,
    FEWEST_TOKENS,
    FIRST_STEPS,
    FIRST_UPDATES,
    FIRST_UPDATES_MULTIPLE,
    LARGEST_RISE,
    LoopSettings,
    LoopState,
    Reading,
    advance_loop,
    finding,
)
from foreshock.learning_rate.schedule import Point

SETTINGS = LoopSettings()
START = Reading(k3=2e-4, lag=0.0)


def after(readings: Iterable[Reading], state: LoopState | None = None, settings: LoopSettings = SETTINGS) -> LoopState:
    state = state or LoopState()
    for reading in readings:
        state = advance_loop(state, reading, settings)
    return state


def scale(state: LoopState) -> float:
    return math.exp(state.log_scale)


def lagging(k3: float, steps: int) -> list[Reading]:
    return [START, *[Reading(k3=k3, lag=8.0)] * steps]


def planned(k3: float, steps: range, last_step: float | None = 100.0) -> list[Reading]:
    return [Reading(k3=k3, lag=8.0, step=step, last_step=last_step) for step in steps]


def test_lagging_mismatch_beyond_the_set_point_lowers_to_the_floor_and_no_further() -> None:
    assert scale(after(lagging(3e-2, 10))) < 0.7
    assert scale(after(lagging(3e-2, 200))) == pytest.approx(SETTINGS.floor)


@pytest.mark.parametrize("k3", [5e-3, 2e-2, 0.3])
def test_static_numerics_at_lag_0_never_lower_the_rate_and_the_finding_says_so(k3: float) -> None:
    state = after([Reading(k3=k3 * (1.0 + step / 100), lag=0.0) for step in range(150)])
    assert (state.log_scale, state.driven) == (0.0, 0.0)
    said = finding(state, SETTINGS)
    assert (said is None) == (state.static is not None and state.static <= SETTINGS.set_point)
    assert said is None or "A lower learning rate would not help" in said


def test_static_part_is_subtracted_from_lagging_tokens() -> None:
    numerics = after([Reading(k3=2e-2, lag=0.0), *[Reading(k3=3e-2, lag=4.0)] * 100])
    assert numerics.log_scale == 0.0
    assert numerics.driven == pytest.approx(1e-2)
    driven = after([Reading(k3=2e-2, lag=0.0), *[Reading(k3=2e-1, lag=4.0)] * 100])
    assert scale(driven) == pytest.approx(SETTINGS.floor)


def test_set_point_of_a_planned_run_is_higher_at_first_and_falls_to_its_end() -> None:
    state = after(planned(1e-1, range(2, 21)), after([replace(START, step=1, last_step=100.0)]))
    points = [state.set_point(SETTINGS)]
    for step in range(21, 101):
        state = after(planned(2e-2, range(step, step + 1)), state)
        points.append(state.set_point(SETTINGS))
    assert points[0] == points[20] == SETTINGS.first_set_point > SETTINGS.set_point
    assert points == sorted(points, reverse=True)
    assert points[-1] == SETTINGS.last_set_point
    # With the cube of what is left of the cooldown: half of it is left at step 70.
    assert points[50] == pytest.approx(SETTINGS.first_set_point / 8.0)
    assert scale(state) == pytest.approx(SETTINGS.floor)


def test_planned_end_lowers_a_mismatch_that_was_within_its_set_point_before() -> None:
    k3 = 0.9 * SETTINGS.first_set_point
    early = after([START, *planned(k3, range(2, 41))])
    assert early.log_scale == 0.0
    assert scale(after(planned(k3, range(41, 101)), early)) == pytest.approx(SETTINGS.floor)


def test_higher_set_point_of_a_long_planned_run_ends_with_the_first_steps() -> None:
    state = after([replace(START, step=1, last_step=1e4), *planned(1e-2, range(2, FIRST_STEPS + 1), 1e4)])
    assert (state.log_scale, state.set_point(SETTINGS)) == (0.0, SETTINGS.first_set_point)
    later = after(planned(1e-2, range(FIRST_STEPS + 1, 2 * FIRST_STEPS), 1e4), state)
    assert later.set_point(SETTINGS) == SETTINGS.set_point
    assert later.log_scale < 0.0


def test_planned_end_leaves_a_rate_alone_that_was_not_lowered() -> None:
    healthy = after([START, *planned(0.9 * SETTINGS.set_point, range(2, 101))])
    assert healthy.log_scale == 0.0
    assert healthy.set_point(SETTINGS) == SETTINGS.set_point


@pytest.mark.parametrize("last_step", [None, 0.0, -1.0])
def test_without_a_plan_the_usual_set_point_holds(last_step: float | None) -> None:
    state = after([START, *planned(1e-4, range(2, 50), last_step)])
    assert state.left is None
    assert state.set_point(SETTINGS) == SETTINGS.set_point


def test_plan_goes_on_without_its_scalar_and_ends_with_its_last_step() -> None:
    state = after([START, *planned(1e-4, range(2, 80)), *planned(1e-4, range(80, 91), None)])
    assert state.left == pytest.approx(0.1)
    state = after(planned(1e-4, range(91, 102)), state)
    assert (state.left, state.set_point(SETTINGS)) == (None, SETTINGS.set_point)
    assert after(planned(1e-4, range(102, 103), 204.0), state).left == pytest.approx(0.5)


def test_large_updates_lower_the_rate_without_any_mismatch() -> None:
    assert scale(after([Reading(k3=0.0, lag=0.0, update=2e-2)] * 20)) < 0.5
    assert after([Reading(k3=0.0, lag=0.0, update=1e-3)] * 100).log_scale == 0.0


def test_first_updates_have_a_higher_set_point() -> None:
    first = [Reading(update=FIRST_UPDATES_MULTIPLE * SETTINGS.update_set_point)] * FIRST_UPDATES
    started = after(first)
    assert started.log_scale == 0.0
    assert scale(after(first, started)) < 0.7
    assert scale(after([Reading(update=0.1)] * FIRST_UPDATES)) < 0.5


def test_loop_takes_back_slowly_what_it_lowered_and_never_more() -> None:
    low = after(lagging(3e-2, 30))
    state = low
    for _ in range(200):
        before = state.log_scale
        state = advance_loop(state, Reading(k3=2e-4, lag=0.0), SETTINGS)
        assert state.log_scale - before <= LARGEST_RISE + 1e-12
    assert state.log_scale == 0.0
    kept = after([Reading(k3=2e-4, lag=0.0)] * 200, low, replace(SETTINGS, raises=False))
    assert kept.log_scale <= low.log_scale


def test_loop_that_is_off_does_nothing() -> None:
    assert after(lagging(3e-2, 50), settings=replace(SETTINGS, enabled=False)) == LoopState()


@pytest.mark.parametrize(
    "bad",
    [
        Reading(),
        Reading(k3=None, lag=8.0),
        # Lagging tokens with no difference at all: μ was logged in place of π.
        Reading(k3=0.0, lag=8.0),
        Reading(k3=0.0),
        # k3 is never below 0.
        Reading(k3=-1.0, lag=8.0),
        Reading(k3=-1.0, lag=0.0),
        Reading(k3_at_lag_0=-1.0, lag=4.0),
        # A k3 of a few sampled tokens.
        Reading(k3=1e-6, lag=8.0, tokens=FEWEST_TOKENS - 1.0),
        Reading(k3=9.0, lag=8.0, tokens=FEWEST_TOKENS - 1.0),
    ],
)
def test_step_without_a_reading_changes_nothing(bad: Reading) -> None:
    before = after(lagging(3e-2, 20))
    state = after([bad] * 50, before)
    assert state.log_scale == before.log_scale
    assert state.error == before.error


@pytest.mark.parametrize("update", [0.0, -1.0, None])
def test_update_that_is_no_measurement_raises_nothing(update: float | None) -> None:
    before = after([Reading(update=2e-2, rate=1e-4)] * 20)
    assert after([Reading(update=update, rate=1e-4)] * 50, before).log_scale == before.log_scale < 0.0


def test_small_update_raises_nothing_while_k3_is_missing_and_the_other_way_round() -> None:
    both = [replace(reading, update=1e-2, rate=1e-4) for reading in lagging(3e-2, 10)]
    before = after(both)
    # Also if the trainer does not log its rate.
    without_rate = after([replace(reading, rate=None) for reading in both])
    assert after([Reading(k3=1e-5, lag=8.0)] * 50, without_rate).log_scale == without_rate.log_scale < 0.0
    assert after([Reading(update=1e-5, rate=1e-4)] * 50, before).log_scale == before.log_scale < 0.0
    assert after([Reading(k3=1e-5, lag=8.0, rate=1e-4)] * 50, before).log_scale == before.log_scale
    assert after([Reading(update=1e-2, rate=1e-4)] * 50, before).log_scale < before.log_scale
    assert after([Reading(k3=1e-5, lag=8.0, update=1e-5, rate=1e-4)] * 50, before).log_scale > before.log_scale


def test_steps_without_a_reading_are_no_response_to_the_floor() -> None:
    state = after([Reading(k3=1e-3, rate=1e-4)] * 10)
    while state.log_scale > math.log(SETTINGS.floor):
        state = advance_loop(state, Reading(k3=5e-2, rate=1e-4 * scale(state)), SETTINGS)
    state = after([Reading(k3=0.0, rate=1e-5)] * 50, state)
    assert state.follows
    assert scale(state) == pytest.approx(SETTINGS.floor)


def test_k3_of_a_sample_with_enough_tokens_is_a_reading_like_any_other() -> None:
    start = after(lagging(3e-2, 5))
    sampled = after([Reading(k3=3e-2, lag=8.0, tokens=float(FEWEST_TOKENS))] * 5, start)
    assert sampled == after([Reading(k3=3e-2, lag=8.0)] * 5, start)
    assert sampled.log_scale < start.log_scale


@pytest.mark.parametrize("k3", [math.inf, math.nan, -math.inf, -1.0])
def test_values_that_are_no_k3_never_raise_the_rate(k3: float) -> None:
    advice = AppliedAdvice(WarningConfiguration.for_model("dense"))
    scales = []
    for step in range(1, 61):
        value = 2e-4 if step == 1 else 3e-2 if step <= 30 else k3
        advice.observe(ClosedStep(step, {"trainer/rollout:k3_kl": value, "rollout:lag_mean": float(min(step - 1, 8))}))
        scales.append(advice.scale(step + 1))
    assert scales[29] < 0.9
    assert scales == sorted(scales, reverse=True)


def test_unknown_lag_takes_the_first_readings_as_static() -> None:
    assert after([Reading(k3=2e-2)] * 100).log_scale == 0.0
    assert scale(after([*[Reading(k3=1e-3)] * 10, *[Reading(k3=5e-2)] * 60])) == pytest.approx(SETTINGS.floor)


def test_mismatch_of_unknown_lag_that_does_not_follow_the_rate_is_static() -> None:
    state = after([Reading(k3=1e-3, rate=1e-4)] * 10)
    for _ in range(200):
        state = advance_loop(state, Reading(k3=5e-2, rate=1e-4 * scale(state)), SETTINGS)
    assert not state.follows
    assert scale(state) == 1.0
    assert "did not fall with the learning rate" in str(finding(state, SETTINGS))


def test_mismatch_of_unknown_lag_that_follows_the_rate_stays_driven() -> None:
    state = after([Reading(k3=1e-3, rate=1e-4)] * 10)
    for _ in range(200):
        state = advance_loop(state, Reading(k3=1e-3 + 5e-2 * scale(state), rate=1e-4 * scale(state)), SETTINGS)
    assert state.follows
    assert scale(state) < 0.3


def test_nothing_can_respond_in_shadow_mode() -> None:
    state = after([*[Reading(k3=1e-3, rate=1e-4)] * 10, *[Reading(k3=5e-2, rate=1e-4)] * 100])
    assert state.follows
    assert scale(state) == pytest.approx(SETTINGS.floor)


def test_lagging_mismatch_with_a_measured_static_part_is_never_released() -> None:
    state = after([START])
    for _ in range(200):
        state = advance_loop(state, Reading(k3=5e-2, lag=8.0, rate=1e-4 * scale(state)), SETTINGS)
    assert scale(state) == pytest.approx(SETTINGS.floor)


def test_rule_with_the_effect_halve_lowers_while_it_fires() -> None:
    state = after([START, *[replace(START, lowered=("clipping",))] * 30])
    assert scale(state) < 0.5
    assert scale(after([START] * 200, state)) == 1.0


SPIKE = 1e4
"""Nats per token: a single token whose two probabilities differ by e^20, among ten thousand."""


def test_spike_at_lag_0_hides_a_mismatch_for_a_few_steps_only() -> None:
    mixed = Reading(k3=5e-2, lag=4.0, k3_at_lag_0=1e-3)
    state = after([START, *[mixed] * 5, replace(mixed, k3_at_lag_0=SPIKE, k3=SPIKE)])
    assert state.static is not None
    assert state.static < 2e-2
    assert after([mixed] * 40, state).log_scale == pytest.approx(math.log(SETTINGS.floor))


@pytest.mark.parametrize("first", [Reading(k3=SPIKE, lag=0.0), Reading(k3=SPIKE, lag=1.0, k3_at_lag_0=SPIKE)])
@pytest.mark.parametrize("at_lag_0", [None, 1e-3])
def test_spike_in_the_first_step_is_refuted_by_the_next_ten(first: Reading, at_lag_0: float | None) -> None:
    healthy = [Reading(k3=1e-3, lag=4.0, k3_at_lag_0=at_lag_0)] * BASELINE_READINGS
    state = after([first, *healthy])
    assert state.static == pytest.approx(1e-3)
    assert finding(state, SETTINGS) is None
    assert scale(after([Reading(k3=5e-2, lag=4.0, k3_at_lag_0=at_lag_0)] * 60, state)) == pytest.approx(SETTINGS.floor)


@pytest.mark.parametrize("place", [0, 3, 9])
def test_spike_among_the_first_readings_of_an_unknown_lag_is_no_baseline(place: int) -> None:
    first = [Reading(k3=SPIKE if step == place else 1e-3) for step in range(BASELINE_READINGS)]
    assert after(first).static == 1e-3
    assert scale(after([*first, *[Reading(k3=5e-2)] * 60])) == pytest.approx(SETTINGS.floor)


@pytest.mark.parametrize("amplitude", [1.0, 5e-2])
def test_spike_does_not_make_what_follows_the_rate_static(amplitude: float) -> None:
    for place in range(15, 60, 4):
        state = after([Reading(k3=1e-3, rate=1e-4)] * 10)
        for step in range(200):
            k3 = SPIKE if step == place else 1e-3 + amplitude * scale(state) ** 2
            state = advance_loop(state, Reading(k3=k3, rate=1e-4 * scale(state)), SETTINGS)
        assert state.follows
        assert scale(state) < 0.5


def test_few_low_readings_refute_no_static_part() -> None:
    static = replace(START, k3=2e-2)
    low = [Reading(k3=1e-4, lag=4.0)] * (BASELINE_READINGS - 1)
    state = after([static, *low, Reading(k3=2e-2, lag=4.0), *low])
    assert state.static == 2e-2


def test_state_round_trips_through_json() -> None:
    state = after([Reading(k3=1e-3, rate=1e-4)] * 10 + [Reading(k3=5e-2, rate=1e-4, lowered=("clipping",))] * 30)
    assert state.response is not None
    assert state.lowered == ("clipping",)
    stored = json.loads(json.dumps(asdict(state)))
    assert LoopState.from_json(stored) == state


@pytest.mark.parametrize(
    "changes",
    [{"set_point": 0.0}, {"gain": math.nan}, {"floor": 0.0}, {"floor": 1.5}, {"weight": 2.0}, {"cooldown": 1.1}],
)
def test_invalid_gains_are_refused(changes: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(changes))):
        LoopSettings(**changes)  # type: ignore[arg-type]


def reason_of(state: LoopState, scale: float = 1.0) -> str:
    """Return the reason of the loop's decision at step 10, from a scale that it decided at step 0."""
    moved = next_point(Point(loop=scale, loop_step=0), math.log(scale), state, SETTINGS, 10, 0.1)
    assert moved is not None
    return moved[-1]


def test_rise_names_no_number_that_the_cut_average_does_not_have() -> None:
    low = after([START, *[Reading(k3=1e-1, lag=8.0)] * 20])
    back = after([Reading(k3=2.1e-4, lag=8.0)] * 30, low)
    assert math.exp(back.error) == pytest.approx(0.74, abs=0.01)
    assert back.driven is not None
    assert back.driven / back.set_point(SETTINGS) == pytest.approx(1.7e-3, rel=0.1)
    assert reason_of(back, scale(low)).startswith(
        "The driven mismatch is 1e-05 nats per token (set point 0.006); recent steps are below the set point: "
        "the control loop raises the scale to "
    )


def test_rule_is_named_as_the_cause_where_it_counts_more_than_the_values() -> None:
    small = Reading(k3=1e-3, lag=8.0)
    firing = replace(small, lowered=("clipping",))
    state = after([START, *[firing] * 10])
    assert reason_of(state).startswith(
        "Rule clipping has fired (counts as 2 × a set point) and the driven mismatch is 0.0008 nats per token "
        "(set point 0.006); recent steps count as 1."
    )
    # It is the cause, too, of what is lowered in the steps after it.
    assert reason_of(after([small], state)).startswith("Rule clipping has fired")
    assert after([small] * 30, state).lowered == ()
    both = after([replace(firing, lowered=("clipping", "kl_rise"))], state)
    assert reason_of(both).startswith("Rules clipping, kl_rise have fired (counts as 2 × a set point) and the driven")
    # A value that is farther beyond its set point is the cause.
    large = after([Reading(k3=5e-2, lag=8.0, lowered=("clipping",))] * 5, state)
    assert reason_of(large).startswith("The driven mismatch is 0.05 nats per token")
    assert reason_of(after([Reading(lowered=("clipping",))] * 10)).startswith("Rule clipping has fired (counts as 2 ×")


def decided(readings: Sequence[Reading], every: int = 1) -> tuple[list[Decision], list[float]]:
    """Return the decisions of a trainer that asks once in `every` steps, and the scale of the step after each one."""
    state, log, scales = LoopState(), list[Decision](), list[float]()
    for step, reading in enumerate(readings):
        state = advance_loop(state, replace(reading, step=step), SETTINGS)
        if (step + 1) % every == 0:
            log += decide(fold(log), Observation(1, step, step, None, at_us=step, loop=state))
        scales.append(fold(log).scale(step + 1))
    return log, scales


LOW, HIGH, MISSING = Reading(k3=3e-4, lag=8.0), Reading(k3=6e-2, lag=8.0), Reading()


def test_fall_ends_after_two_steps_without_k3() -> None:
    log, scales = decided([START, *[LOW] * 20, *[HIGH] * 4, *[MISSING] * 30])
    assert log[-1].reason == (
        "The last 2 steps, up to step 26, lack a measured mismatch: "
        f"the control loop keeps the scale at {scales[-1]:.2g} until a step has one."
    )
    assert len(set(scales[26:])) == 1
    measured, last = math.exp(after([START, *[LOW] * 20, *[HIGH] * 4]).log_scale), scales[-1]
    assert 0.75 * measured < last < measured
    # A fall goes on when k3 is back.
    assert decided([START, *[LOW] * 20, *[HIGH] * 4, *[MISSING] * 30, *[HIGH] * 3])[1][-1] < last


def test_fall_ends_if_updates_are_no_longer_logged_and_the_mismatch_is_low() -> None:
    busy = replace(LOW, update=3e-2)
    log, scales = decided([replace(START, update=1e-3), *[busy] * 14, *[LOW] * 20])
    assert "lack an update" in log[-1].reason
    assert scales[-1] == scales[18] > SETTINGS.floor


def test_update_that_comes_after_its_step_has_closed_ends_no_fall() -> None:
    state, log = LoopState(), list[Decision]()
    for step in range(60):
        whole = Reading(
            k3=2e-4 if step == 0 else 3e-4, lag=8.0 * (step > 0), update=1e-3 if step < 15 else 3e-3, step=step
        )
        for reading in (replace(whole, update=None), whole):
            newer = advance_loop(state, reading, SETTINGS)
            log += decide(fold(log), Observation(1, step, step, None, at_us=step, loop=newer))
        state = newer
    assert fold(log).scale(60) < 0.5
    assert not any("lack" in decision.reason for decision in log)


def test_what_late_steps_left_of_a_rise_waits_for_k3() -> None:
    readings = [START, *[HIGH] * 20, *[LOW] * 24]
    scales = decided([*readings, *[MISSING] * 20], every=5)[1]
    assert scales[len(readings)] < 0.8 * scale(after(readings))
    assert len(set(scales[len(readings) :])) == 1
    assert decided([*readings, *[LOW] * 20], every=5)[1][-1] > scales[-1]


def test_what_late_steps_left_of_a_fall_is_made_up_without_a_false_cause() -> None:
    state = after([START, *[HIGH] * 20, replace(MISSING, step=21)])
    moved = next_point(Point(20, loop=0.9, loop_step=20), 0.0, state, SETTINGS, 22, 0.1)
    assert moved is not None
    assert moved[0] < 0.9
    assert moved[-1].startswith("Step 21 lacks a measured mismatch; recent steps count as 9.7 × the set point: ")


@given(
    st.lists(st.sampled_from([LOW, HIGH, MISSING, replace(LOW, update=1e-3), replace(LOW, update=1e-1)]), max_size=60),
    st.integers(1, 7),
)
def test_no_decision_raises_the_scale_at_a_step_that_lacks_a_value(readings: list[Reading], every: int) -> None:
    state, log = LoopState(), list[Decision]()
    for step, reading in enumerate([START, *readings]):
        state = advance_loop(state, replace(reading, step=step), SETTINGS)
        if (step + 1) % every:
            continue
        before = fold(log).scale(step + 1)
        log += decide(fold(log), Observation(1, step, step, None, at_us=step, loop=state))
        if reading is MISSING:
            assert fold(log).scale(step + 1) <= before
