"""The law of the control loop: what counts as driven, where the scale goes, and what bad input does to it."""

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreshock.backtest.replay import AppliedAdvice
from foreshock.diagnosis.detectors import ClosedStep, WarningConfiguration
from foreshock.learning_rate.control_loop import (
    FEWEST_TOKENS,
    FIRST_UPDATES,
    FIRST_UPDATES_MULTIPLE,
    LARGEST_FACTOR,
    LARGEST_FALL,
    LARGEST_RISE,
    PATIENCE,
    LoopSettings,
    LoopState,
    Reading,
    advance_loop,
)
from foreshock.learning_rate.decisions import Decision, Observation, decide, fold, next_point, set_mode
from foreshock.learning_rate.length_decay import Point
from foreshock.learning_rate.remedy import finding

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
    assert scale(after(lagging(6e-2, 10))) < 0.7
    assert scale(after(lagging(6e-2, 200))) == pytest.approx(SETTINGS.floor)


@pytest.mark.parametrize("k3", [5e-3, 2e-2, 0.3])
def test_static_numerics_at_lag_0_never_lower_the_rate_and_the_finding_says_so(k3: float) -> None:
    state = after([Reading(k3=k3 * (1.0 + step / 100), lag=0.0) for step in range(150)])
    assert (state.log_scale, state.driven) == (0.0, 0.0)
    said = finding(state, SETTINGS)
    assert (said is None) == (state.static is not None and state.static <= SETTINGS.set_point)
    assert said is None or "A lower learning rate would not help" in said


def test_static_part_is_subtracted_and_does_not_hide_a_driven_part_of_its_size() -> None:
    within = after([Reading(k3=2e-2, lag=0.0), *[Reading(k3=3e-2, lag=4.0)] * 100])
    assert within.log_scale == 0.0
    assert within.driven == pytest.approx(1e-2)
    driven = after([Reading(k3=2e-2, lag=0.0), *[Reading(k3=6e-2, lag=4.0)] * 100])
    assert scale(driven) == pytest.approx(SETTINGS.floor)


@pytest.mark.parametrize(("length", "of_tokens"), [(12.0, 1.0), (64.0, 0.5), (256.0, 0.25)])
def test_set_point_of_a_token_falls_and_of_a_response_rises_with_the_length(length: float, of_tokens: float) -> None:
    state = after([START, Reading(k3=1e-3, lag=8.0, length=length)])
    point = state.set_point(SETTINGS)
    assert point == pytest.approx(of_tokens * SETTINGS.set_point)
    for factor, lowers in ((2.0, True), (0.5, False)):
        reading = Reading(k3=2e-4 + factor * point, lag=8.0, length=length)
        assert (after([START, *[reading] * 30]).log_scale < 0.0) == lowers


@pytest.mark.parametrize("last", [50, 150, 10_000])
def test_lowered_scale_falls_to_the_floor_at_the_planned_end_in_runs_of_any_length(last: int) -> None:
    state = after([replace(START, step=1), *planned(1e-1, range(2, last // 2), float(last))])
    for reading in planned(1e-4, range(last // 2, last + 1), float(last)):
        state = after([reading], state)
        line = (last - reading.step) / (SETTINGS.cooldown * last)
        assert scale(state) <= max(line, SETTINGS.floor) + 1e-9
    assert scale(state) == pytest.approx(SETTINGS.floor)
    assert state.only_cools(SETTINGS)


def test_scale_falls_to_the_floor_at_the_planned_end_also_if_the_whole_rate_was_never_in_force() -> None:
    advice = AppliedAdvice(WarningConfiguration.for_model("dense"), starts=True)
    for step in range(1, 61):
        values = {"scalars:update_k3": 0.1 if step < 9 else 1e-3, "scalars:lr": 2e-2 * advice.scale(step)}
        advice.observe(ClosedStep(step, {**values, "scalars:planned_last_step": 60.0}))
    scales = [advice.scale(step) for step in range(1, 62)]
    assert max(scales[:3]) < 0.5
    assert max(scales[12:40]) > 0.3
    assert scales[-1] == pytest.approx(SETTINGS.floor)


def test_planned_end_leaves_a_rate_alone_that_was_not_lowered() -> None:
    healthy = after([START, *planned(0.9 * SETTINGS.set_point, range(2, 101))])
    assert healthy.log_scale == 0.0
    assert not healthy.cools(SETTINGS)


@pytest.mark.parametrize("last_step", [None, 0.0, -1.0])
def test_without_a_plan_nothing_cools(last_step: float | None) -> None:
    state = after([START, *planned(1e-1, range(2, 50), last_step)])
    assert state.left is None
    assert not state.cools(SETTINGS)


def test_plan_goes_on_without_its_scalar_and_ends_with_its_last_step() -> None:
    state = after([START, *planned(1e-4, range(2, 80)), *planned(1e-4, range(80, 91), None)])
    assert state.left == pytest.approx(0.1)
    assert after(planned(1e-4, range(91, 102)), state).left is None
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


@pytest.mark.parametrize("times", [2.5, 9.0, 400.0])
def test_first_update_far_beyond_its_set_point_lowers_the_rate_at_once(times: float) -> None:
    """The k3 of an update grows with the square of the rate: the next one is at its set point."""
    state = after([Reading(update=times * FIRST_UPDATES_MULTIPLE * SETTINGS.update_set_point, rate=1e-3)])
    assert scale(state) == pytest.approx(max(times**-0.5, 1.0 / LARGEST_FACTOR))
    moved = next_point(Point(), 0.0, state, SETTINGS, 2, SETTINGS.floor)
    assert moved is not None
    assert moved[0] == pytest.approx(scale(state))


def test_later_update_far_beyond_its_set_point_lowers_the_rate_step_by_step() -> None:
    usual = after([Reading(update=SETTINGS.update_set_point, rate=1e-3)] * (FIRST_UPDATES + 1))
    state = advance_loop(usual, Reading(update=400.0 * SETTINGS.update_set_point, rate=1e-3), SETTINGS)
    assert 0.0 < usual.log_scale - state.log_scale <= LARGEST_FALL


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
    before = after([replace(reading, update=1e-2) for reading in lagging(3e-2, 10)])
    for part in (Reading(k3=1e-5, lag=8.0), Reading(update=1e-5)):
        assert after([part] * 50, before).log_scale == before.log_scale < 0.0
    assert after([Reading(update=1e-2)] * 50, before).log_scale < before.log_scale
    assert after([Reading(k3=1e-5, lag=8.0, update=1e-5)] * 50, before).log_scale > before.log_scale


def test_k3_of_a_sample_with_enough_tokens_is_a_reading_like_any_other() -> None:
    start = after(lagging(3e-2, 5))
    sampled = after([Reading(k3=3e-2, lag=8.0, tokens=float(FEWEST_TOKENS))] * 5, start)
    assert sampled == after([Reading(k3=3e-2, lag=8.0)] * 5, start)
    assert sampled.log_scale < start.log_scale


def answering(state: LoopState, k3: Callable[[float], float | None], steps: int) -> LoopState:
    """Return the state after steps of an unknown lag whose trainer follows the scale."""
    for step in range(2, 2 + steps):
        reading = Reading(k3=k3(scale(state)), rate=1e-4 * scale(state), step=step)
        state = advance_loop(state, reading, SETTINGS)
    return state


def scales_of(rewards: Sequence[float], update: float | None) -> list[float]:
    """Return the scales of a synchronous run that logs its reward, its gradient norm, and perhaps its updates."""
    advice, scales = AppliedAdvice(WarningConfiguration.for_model("dense")), list[float]()
    for step, reward in enumerate(rewards, start=1):
        values = {"rollout:reward_mean": reward, "scalars:grad_norm": 1.0 if reward > 0.5 else 20.0}
        values |= {} if update is None else {"scalars:update_k3": update}
        advice.observe(ClosedStep(step, values))
        scales.append(advice.scale(step + 1))
    return scales


def test_fallen_reward_lowers_the_rate_of_a_run_that_logs_neither_lags_nor_updates() -> None:
    steady = [0.6 + 0.02 * (-1) ** step for step in range(60)]
    falling = [*steady, *(max(0.6 - 0.03 * step, 0.0) for step in range(40))]
    assert scales_of(falling, None)[-1] < 0.5
    assert scales_of([*steady, *steady], None)[-1] == 1.0
    # A logged update that is within its set point says that the rate is not the cause.
    assert scales_of(falling, 1e-4)[-1] == 1.0


def test_first_step_of_an_unknown_lag_is_static_as_no_update_came_before_it() -> None:
    state = after([Reading(k3=2e-2, step=1), *[Reading(k3=3e-2, step=2)] * 100])
    assert (state.static, state.log_scale) == (2e-2, 0.0)
    assert scale(after([Reading(k3=6e-2, step=3)] * 60, state)) == pytest.approx(SETTINGS.floor)


def test_readings_of_an_unknown_lag_are_not_static_because_they_come_first() -> None:
    joined = after([Reading(k3=6e-2, rate=1e-4, step=500)])
    assert (joined.static, joined.driven) == (None, 6e-2)
    assert scale(answering(joined, lambda scale: 6e-2 * scale**2, 60)) < 0.7


def test_mismatch_of_unknown_lag_that_does_not_follow_the_rate_is_static() -> None:
    state = answering(after([Reading(k3=1e-3, rate=1e-4, step=1)]), lambda scale: 6e-2, 120)
    assert not state.follows
    assert scale(state) == 1.0
    assert "did not fall with the learning rate" in str(finding(state, SETTINGS))


def test_mismatch_of_unknown_lag_that_follows_the_rate_stays_driven() -> None:
    state = answering(after([Reading(k3=1e-3, rate=1e-4, step=1)]), lambda scale: 1e-3 + 1e-1 * scale, 200)
    assert state.follows
    assert scale(state) < 0.4


def test_steps_without_a_reading_are_no_response() -> None:
    low = answering(after([Reading(k3=1e-3, rate=1e-4, step=1)]), lambda scale: 6e-2, PATIENCE)
    state = answering(low, lambda scale: None, 50)
    assert (state.follows, state.log_scale) == (True, low.log_scale)


def test_nothing_can_respond_in_shadow_mode_and_the_loop_stays_at_the_rate_in_force() -> None:
    shadow = after([Reading(k3=1e-3, rate=1e-4, step=1), *[Reading(k3=6e-2, rate=1e-4, step=2)] * 100])
    assert shadow.follows
    assert shadow.log_scale == pytest.approx(-2.0 * LARGEST_FALL)
    # Once the trainer follows, the mismatch is judged, and lowered, as if shadow mode had never been.
    followed = answering(shadow, lambda scale: 1e-3 + 1e-1 * scale, 100)
    assert followed.follows
    assert scale(followed) < 0.4


def test_schedule_of_the_trainer_is_not_taken_for_the_scale() -> None:
    decayed = after([START, *[Reading(k3=1e-3, lag=8.0, rate=1e-4 * (1.0 - step / 50)) for step in range(50)]])
    assert decayed.log_scale == 0.0


def test_apply_mode_after_shadow_starts_at_the_whole_rate_and_falls_step_by_step() -> None:
    state, log, scales = after([START]), list[Decision](), list[float]()
    for step in range(2, 80):
        seen = Observation(1, step - 1, step - 1, None, at_us=step, loop=state)
        if step == 40:
            log.append(set_mode(fold(log), "apply", seen, "operator"))
        log += decide(fold(log), seen)
        applied = fold(log).scale(step) if step >= 40 else 1.0
        scales.append(applied)
        state = advance_loop(state, Reading(k3=6e-2, lag=8.0, rate=1e-4 * applied, step=step), SETTINGS)
    falls = [math.log(earlier / later) for earlier, later in pairwise(scales)]
    assert scales[38] == 1.0
    assert max(falls) <= LARGEST_FALL + SETTINGS.gain * math.log(LARGEST_FACTOR)
    assert scales[-1] == pytest.approx(SETTINGS.floor)


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
    assert state.static < LARGEST_FACTOR * SETTINGS.weight * SETTINGS.set_point + 1e-3
    assert after([mixed] * 40, state).log_scale == pytest.approx(math.log(SETTINGS.floor))


@pytest.mark.parametrize("first", [Reading(k3=SPIKE, lag=0.0), Reading(k3=SPIKE, lag=1.0, k3_at_lag_0=SPIKE)])
@pytest.mark.parametrize("at_lag_0", [None, 1e-3])
def test_spike_in_the_first_step_is_refuted_by_smaller_readings(first: Reading, at_lag_0: float | None) -> None:
    state = after([first, *[Reading(k3=1e-3, lag=4.0, k3_at_lag_0=at_lag_0)] * 20])
    assert state.static is not None
    assert state.static <= 1e-2
    assert finding(state, SETTINGS) is None
    assert scale(after([Reading(k3=5e-2, lag=4.0, k3_at_lag_0=at_lag_0)] * 60, state)) == pytest.approx(SETTINGS.floor)


@pytest.mark.parametrize("amplitude", [1.0, 1e-1])
def test_spike_does_not_make_what_follows_the_rate_static(amplitude: float) -> None:
    for place in range(15, 60, 4):
        state = after([Reading(k3=1e-3, rate=1e-4)] * 10)
        for step in range(200):
            k3 = SPIKE if step == place else 1e-3 + amplitude * scale(state) ** 2
            state = advance_loop(state, Reading(k3=k3, rate=1e-4 * scale(state)), SETTINGS)
        assert state.follows
        assert scale(state) < 0.5


def test_state_round_trips_through_json() -> None:
    low = [Reading(k3=6e-2, rate=1e-5, lowered=("clipping",))] * 5
    state = after([Reading(k3=1e-3, rate=1e-4), *[Reading(k3=6e-2, rate=1e-4)] * 20, *low])
    assert state.at_floor
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
    assert math.exp(back.error) == pytest.approx(math.exp(-LARGEST_RISE / SETTINGS.gain))
    assert back.driven is not None
    assert back.driven / back.set_point(SETTINGS) < 1e-3
    assert reason_of(back, scale(low)).startswith(
        "The driven mismatch is 1e-05 nats per token (set point 0.015); recent steps are below the set point: "
        "the control loop raises the scale to "
    )


def test_rule_is_named_as_the_cause_where_it_counts_more_than_the_values() -> None:
    small = Reading(k3=1e-3, lag=8.0)
    firing = replace(small, lowered=("clipping",))
    state = after([START, *[firing] * 10])
    assert reason_of(state).startswith(
        "Rule clipping has fired (counts as 2 × a set point) and the driven mismatch is 0.0008 nats per token "
        "(set point 0.015); recent steps count as 1."
    )
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
    log, scales = decided([*[replace(START, update=1e-3)] * FIRST_UPDATES, *[busy] * 7, *[LOW] * 20])
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
    assert moved[-1].startswith("Step 21 lacks a measured mismatch; recent steps count as ")


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
            assert fold(log).scale(step + 1) <= before * (1 + 1e-12)
