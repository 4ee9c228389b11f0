"""Tests of the halving rule: the published example, and the rule applied step by step."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreshock.learning_rate.schedule import LengthDecaySchedule, next_fall, scale_at


def test_surge_at_110_halves_at_198_396_594_and_reaches_the_floor_at_792() -> None:
    schedule = LengthDecaySchedule.from_surge(110)
    assert schedule.decay_period == 198
    assert schedule.boundaries_until(800) == (198, 396, 594, 792)
    scales = {step: scale_at(schedule, (), step) for step in (0, 197, 198, 395, 396, 593, 594, 791, 792, 5000)}
    assert scales == {
        0: 1.0, 197: 1.0, 198: 0.5, 395: 0.5, 396: 0.25, 593: 0.25, 594: 0.125, 791: 0.125, 792: 0.1, 5000: 0.1
    }  # fmt: skip


@pytest.mark.parametrize(("surge_step", "period"), [(0, 45), (24, 45), (25, 45), (56, 100), (90, 162), (1500, 2700)])
def test_period_is_1_8_times_the_surge_step_and_at_least_45(surge_step: int, period: int) -> None:
    assert LengthDecaySchedule.from_surge(surge_step).decay_period == period


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 400), st.integers(0, 900), st.integers(0, 2000))
def test_scale_is_the_rule_applied_at_every_step(period: int, first: int, last: int) -> None:
    schedule = LengthDecaySchedule(100, period, effective_from_step=first)
    scale = 1.0
    for step in range(1, last + 1):
        if step % period == 0 and step >= first:
            scale = max(scale / 2, 0.1)
    assert scale_at(schedule, (), last) == pytest.approx(scale, rel=1e-12)
    assert len(schedule.boundaries_until(last)) == schedule.halvings_until(last)


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 400), st.integers(0, 900), st.integers(0, 900), st.integers(0, 2000))
def test_pausing_freezes_the_scale_from_its_step(period: int, first: int, pause: int, step: int) -> None:
    running = LengthDecaySchedule(100, period, effective_from_step=first)
    paused = running.paused_from(pause)
    assert scale_at(paused, (), step) == scale_at(running, (), min(step, pause - 1))
    if step >= pause:
        assert next_fall(paused, (), step) is None
    assert paused.effective_from(first) == running


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 3000), st.integers(0, 900), st.one_of(st.none(), st.integers(0, 900)))
def test_json_round_trip(surge_step: int, first: int, pause: int | None) -> None:
    schedule = LengthDecaySchedule.from_surge(surge_step, effective_from_step=first)
    schedule = schedule if pause is None else schedule.paused_from(pause)
    assert LengthDecaySchedule.from_json(json.loads(json.dumps(schedule.to_json()))) == schedule


@pytest.mark.parametrize("wrong", [{"decay_period": 0}, {"factor": 1.0}, {"factor": 0.0}, {"floor": -0.1}])
def test_schedules_that_would_never_or_always_fall_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        LengthDecaySchedule(**{"surge_step": 110, "decay_period": 198, **wrong})  # type: ignore[arg-type]
