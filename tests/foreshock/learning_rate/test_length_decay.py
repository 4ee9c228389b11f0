"""Tests of the halving rule: the published example, and the rule applied step by step."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreshock.learning_rate.length_decay import Point, Schedule, halvings_of, next_fall


def test_surge_at_110_halves_at_198_396_594_and_reaches_the_floor_at_792() -> None:
    schedule = Schedule.from_surge(110)
    assert schedule.decay_period == 198
    point = Point(boundary=schedule.boundary(0), period=schedule.decay_period)
    assert halvings_of([point, point.from_step(800)]) == (198, 396, 594, 792)
    steps = (0, 197, 198, 395, 396, 593, 594, 791, 792, 5000)
    assert [point.scale(step, 0.5, 0.1) for step in steps] == [1.0, 1.0, 0.5, 0.5, 0.25, 0.25, 0.125, 0.125, 0.1, 0.1]


@pytest.mark.parametrize(("surge_step", "period"), [(0, 45), (24, 45), (25, 45), (56, 100), (90, 162), (1500, 2700)])
def test_period_is_1_8_times_the_surge_step_and_at_least_45(surge_step: int, period: int) -> None:
    assert Schedule.from_surge(surge_step).decay_period == period


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 400), st.integers(0, 900), st.integers(0, 2000), st.integers(0, 2000))
def test_scale_is_the_rule_applied_at_every_step(period: int, first: int, cut: int, last: int) -> None:
    point = Point(boundary=Schedule(100, period).boundary(first), period=period)
    scale = 1.0
    for step in range(1, last + 1):
        if step % period == 0 and step >= first:
            scale = max(scale / 2, 0.1)
    assert point.scale(last, 0.5, 0.1) == pytest.approx(scale, rel=1e-12)
    later = point.from_step(cut)
    assert cut > last or later.count(last) == point.count(last)
    assert later.boundary is not None
    assert later.boundary >= cut
    falls = next_fall([point], last, 0.5, 0.1)
    assert falls == (None if scale == 0.1 else max(Schedule(100, period).boundary(last + 1), point.boundary or 0))


@pytest.mark.parametrize("wrong", [{"decay_period": 0}, {"factor": 1.0}, {"factor": 0.0}, {"floor": -0.1}])
def test_schedules_that_would_never_or_always_fall_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Schedule(**{"surge_step": 110, "decay_period": 198, **wrong})  # type: ignore[arg-type]
