"""The decisions of the control loop: what late and missing values do to the scale, and the reasons that are given."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreshock.learning_rate.decisions import Decision, Observation, decide, fold
from foreshock.learning_rate.loop import LoopState, Reading, advance_loop
from foreshock.learning_rate.loop_moves import next_point
from foreshock.learning_rate.schedule import LoopPoint
from tests.foreshock.learning_rate.test_loop import SETTINGS, START, after, scale


def reason_of(state: LoopState, points: tuple[LoopPoint, ...] = ()) -> str:
    """Return the reason of the loop's decision ten steps after the newest point."""
    step = points[-1].step + 10 if points else 10
    moved = next_point(points, math.log(points[-1].scale) if points else 0.0, state, SETTINGS, step, 0.1)
    assert moved is not None
    return moved[2]


def test_rise_names_no_number_that_the_cut_average_does_not_have() -> None:
    low = after([START, *[Reading(k3=1e-1, lag=8.0)] * 20])
    points = (LoopPoint(0, scale(low)),)
    back = after([Reading(k3=2.1e-4, lag=8.0)] * 30, low)
    assert math.exp(back.error) == pytest.approx(0.74, abs=0.01)
    assert back.driven is not None
    assert back.driven / back.set_point(SETTINGS) == pytest.approx(1.7e-3, rel=0.1)
    assert reason_of(back, points).startswith(
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
            log += decide(log, Observation(1, step, step, None, at_us=step, loop=state))
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
            log += decide(log, Observation(1, step, step, None, at_us=step, loop=newer))
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
    moved = next_point((LoopPoint(20, 0.9),), 0.0, state, SETTINGS, 22, 0.1)
    assert moved is not None
    assert moved[0].scale < 0.9
    assert moved[2].startswith("Step 21 lacks a measured mismatch; recent steps count as 9.7 × the set point: ")


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
        log += decide(log, Observation(1, step, step, None, at_us=step, loop=state))
        if reading is MISSING:
            assert fold(log).scale(step + 1) <= before
