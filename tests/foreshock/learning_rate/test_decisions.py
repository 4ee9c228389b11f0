"""Tests of the advice decisions: single cases, then a state machine with events in any order."""

import json
import math
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from foreshock.api.records import parse, to_json
from foreshock.diagnosis.detectors import OpenSignal
from foreshock.learning_rate.control_loop import LARGEST_FALL, LARGEST_RISE, LoopSettings, LoopState
from foreshock.learning_rate.decisions import (
    STEPS_OF_A_RISE,
    AdviceConflictError,
    AdviceState,
    Decision,
    Observation,
    decide,
    decide_as_operator,
    fold,
    fold_on,
    rewind,
    set_mode,
)
from foreshock.learning_rate.length_decay import Point, Schedule, ScheduleSettings, halvings_of, next_fall


def observed(step: int, surge: int | None = None, log_scale: float | None = None, trainer: int = -1) -> Observation:
    """An observation; ``log_scale`` is that of the detectors' loop."""
    loop = None if log_scale is None else LoopState(static=1e-4, driven=2e-2, error=0.5, log_scale=log_scale)
    return Observation(1, step, trainer, surge, at_us=1_000 + step, loop=loop)


def log_after(*observations: Observation) -> list[Decision]:
    log: list[Decision] = []
    for observation in observations:
        log.extend(decide(fold(log), observation))
    return log


def test_surge_at_110_is_one_decision_and_the_published_schedule() -> None:
    log = log_after(*(observed(step, 110 if step >= 114 else None) for step in range(1, 300)))
    assert [decision.kind for decision in log] == ["surge"]
    state = fold(log)
    assert (state.revision, log[0].observed_step, log[0].effective_from_step) == (1, 114, 115)
    assert [state.scale(step) for step in (197, 198, 396, 594, 792)] == [1.0, 0.5, 0.25, 0.125, 0.1]
    assert state.next_decay_step(201) == 396
    assert [state.phase(step, warming=False) for step in (201, 792)] == ["decaying", "floor"]


def test_boundaries_already_past_are_not_caught_up() -> None:
    # The whole history arrives at once, when the trainer is already at step 500.
    state = fold(log_after(observed(120, 110, trainer=500)))
    assert [state.scale(step) for step in (198, 396, 500, 593, 594)] == [1.0, 1.0, 1.0, 1.0, 0.5]


def test_late_data_that_moves_the_surge_changes_future_boundaries_only() -> None:
    log = log_after(observed(114, 110), observed(250, 100))
    state = fold(log)
    assert [decision.kind for decision in log] == ["surge", "surge"]
    # The rate was halved at 198; the new period is 180, so the next boundary is 360, not 396.
    assert [state.scale(step) for step in (197, 198, 250, 359, 360)] == [1.0, 0.5, 0.5, 0.5, 0.25]


def test_slightly_moved_period_does_not_halve_twice_for_one_boundary() -> None:
    state = fold(log_after(observed(114, 110), observed(199, 112)))
    assert [state.scale(step) for step in (198, 201, 300, 402)] == [0.5, 0.5, 0.5, 0.25]


def test_retracted_surge_ends_the_schedule_and_keeps_past_halvings() -> None:
    state = fold(log_after(observed(114, 110), observed(250, None)))
    assert state.schedule is None
    assert [state.scale(step) for step in (198, 250, 396, 1000)] == [0.5, 0.5, 0.5, 0.5]


def test_past_halvings_stay_as_deep_as_they_were() -> None:
    mild = ScheduleSettings(factor=0.8, floor=0.4)
    log = log_after(
        replace(observed(114, 110), schedule=mild),
        # Retracted, then another surge, under other constants.
        observed(250, None),
        replace(observed(300, 290), schedule=ScheduleSettings(factor=0.9, floor=0.05)),
    )
    states = [fold(log[:count]) for count in range(1, len(log) + 1)]
    assert [decision.kind for decision in log] == ["surge", "retract", "surge"]
    assert [state.scale(250) for state in states] == [0.8] * 3
    assert [(state.factor, state.floor) for state in states] == [(0.8, 0.4)] * 3
    # A surge that was retracted before it lowered anything leaves nothing.
    early = fold(log_after(replace(observed(114, 110), schedule=mild), observed(150, None)))
    assert (early.factor, early.floor, halvings_of(early.points)) == (0.5, 0.1, ())


def test_loop_moves_by_the_change_since_its_last_decision() -> None:
    log = log_after(observed(40, None, -0.01), observed(41, None, -0.1), observed(42, None, -0.12))
    assert [(decision.kind, decision.effective_from_step) for decision in log] == [("loop", 42)]
    state = fold(log)
    assert [state.scale(step) for step in (41, 42)] == [1.0, pytest.approx(math.exp(-0.1))]
    assert "0.02 nats per token" in log[0].reason
    # Without further answers the scale goes on along the last fall for ten steps, and stays.
    falls = [state.scale(step) for step in range(42, 100)]
    assert falls[:11] == sorted(falls[:11], reverse=True)
    assert set(falls[10:]) == {falls[10]}
    assert state.next_decay_step(42) == 43
    assert state.next_decay_step(60) is None


def test_late_data_never_makes_the_loop_jump() -> None:
    # The history changes: the detectors' loop is at the floor now, and the trainer at 1.
    log = log_after(observed(40, None, -0.06), observed(41, None, math.log(0.1)))
    assert fold(log).scale(42) == pytest.approx(fold(log[:1]).scale(42) * math.exp(-LARGEST_FALL))
    # And back: the rise is slow.
    before = fold(log).scale(47)
    log.extend(decide(fold(log), replace(observed(46), loop=LoopState(log_scale=0.0, error=-1.0))))
    assert before < fold(log).scale(47) <= before * math.exp(LARGEST_RISE * 5) + 1e-12


def test_rise_that_the_bound_cut_is_made_up_in_later_steps() -> None:
    log = log_after(*(observed(step, None, -0.2 * (step - 39)) for step in range(40, 48)))
    lowest = fold(log).scale(48)
    assert lowest == pytest.approx(math.exp(-1.6))
    # The detectors' loop is back at 1 in one step, as late data may make it; the trainer's scale takes 54 steps.
    scales = [lowest]
    for step in range(48, 120):
        log.extend(decide(fold(log), replace(observed(step), loop=LoopState(static=1e-4, driven=1e-4, error=-1.0))))
        # The same state again, as after an upload of late data, moves nothing: the step has its decision.
        assert decide(fold(log), replace(observed(step), loop=LoopState(static=1e-4, driven=1e-4, error=-1.0))) == ()
        scales.append(fold(log).scale(step + 1))
    rises = [math.log(later / earlier) for earlier, later in pairwise(scales)]
    assert max(rises) <= 2 * LARGEST_RISE + 1e-12
    assert sum(rises[:20]) <= 21 * LARGEST_RISE
    assert scales[-1] == 1.0
    assert scales.index(1.0) >= 1.6 / LARGEST_RISE


def test_rise_begins_at_the_floor_also_after_a_fall_that_went_on_below_it() -> None:
    low = LoopState(static=1e-4, driven=2e-2, error=1.2, log_scale=math.log(0.12))
    log = log_after(*(replace(observed(step), loop=low) for step in range(40, 52)))
    assert fold(log).scale(62) == 0.1
    log.extend(decide(fold(log), replace(observed(61), loop=LoopState(static=1e-4, driven=1e-4, error=-1.0))))
    assert fold(log).scale(62) == pytest.approx(0.1 * math.exp(STEPS_OF_A_RISE * LARGEST_RISE))


def test_loop_without_raises_never_raises() -> None:
    log = log_after(observed(40, None, -1.0))
    back = replace(observed(60), loop=LoopState(log_scale=0.0, error=-1.0), loop_settings=LoopSettings(raises=False))
    assert decide(fold(log), back) == ()


def test_lower_of_schedule_and_loop_holds() -> None:
    log = log_after(observed(114, 110), *(observed(step, 110, -0.1 * (step - 114)) for step in range(115, 121)))
    state = fold(log)
    lowest = state.scale(131)
    assert lowest < 1.0
    assert [state.scale(step) for step in (198, 396)] == [pytest.approx(min(0.5, lowest)), pytest.approx(0.25)]


def test_operator_moves_the_loop_and_the_loop_goes_on_from_there() -> None:
    log = log_after(observed(40, None, -0.2))
    log.append(decide_as_operator(fold(log), "halve", observed(60), "x"))
    halved = fold(log).scale(61)
    assert halved == pytest.approx(fold(log[:1]).scale(61) / 2)
    log.extend(decide(fold(log), observed(61, None, -0.3)))
    assert fold(log).scale(62) == pytest.approx(halved * math.exp(-0.1))
    log.append(decide_as_operator(fold(log), "raise", observed(80), "x"))
    assert fold(log).scale(81) > fold(log).scale(80)


@pytest.mark.parametrize("log_scale", [-2.0, 0.0])
def test_loop_goes_on_from_the_held_scale_step_by_step(log_scale: float) -> None:
    log = log_after(observed(40, None, -0.2))
    log.append(decide_as_operator(fold(log), "hold", observed(41), "evaluation"))
    held = fold(log).scale(42)
    log.extend(decide(fold(log), observed(60, None, log_scale)))
    assert fold(log).scale(5000) == held
    log.append(decide_as_operator(fold(log), "release", observed(61), "over"))
    log.extend(decide(fold(log), observed(62, None, log_scale)))
    scales = [fold(log).scale(63)]
    assert scales[0] == held
    for step in range(63, 90):
        seen = replace(observed(step, None, log_scale), loop=LoopState(error=0.0, log_scale=log_scale))
        log.extend(decide(fold(log), seen))
        scales.append(fold(log).scale(step + 1))
    moves = [math.log(later / earlier) for earlier, later in pairwise(scales)]
    assert min(moves) >= -LARGEST_FALL - 1e-12
    assert max(moves) <= STEPS_OF_A_RISE * LARGEST_RISE + 1e-12
    assert scales[-1] == pytest.approx(max(math.exp(log_scale), 0.1))


def test_hold_freezes_and_release_does_not_catch_up() -> None:
    log = log_after(observed(114, 110))
    log.append(decide_as_operator(fold(log), "hold", observed(150, 110), "evaluation week"))
    held = fold(log)
    assert [held.scale(step) for step in (150, 198, 396, 5000)] == [1.0] * 4
    assert held.phase(150, warming=False) == "held"
    assert held.next_decay_step(150) is None
    log.extend(decide(fold(log), observed(160, 110, -1.0)))
    assert fold(log) == held
    log.append(decide_as_operator(fold(log), "release", observed(400, 110), "over"))
    state = fold(log)
    assert [state.scale(step) for step in (198, 400, 593, 594)] == [1.0, 1.0, 1.0, 0.5]


def test_only_an_operator_raises_and_one_halving_at_a_time() -> None:
    log = log_after(observed(114, 110), observed(450, 110))
    log.append(decide_as_operator(fold(log), "raise", observed(450, 110), "the reward does not rise"))
    state = fold(log)
    assert [state.scale(step) for step in (451, 593, 594)] == [0.5, 0.5, 0.25]
    log = log_after(observed(114, 110), observed(3000, 110))
    log.append(decide_as_operator(fold(log), "raise", observed(3000, 110), "from the floor"))
    assert fold(log).scale(3001) == 0.125


@pytest.mark.parametrize("kind", ["release", "raise"])
def test_decision_without_effect_is_refused(kind: str) -> None:
    with pytest.raises(AdviceConflictError):
        decide_as_operator(fold([]), kind, observed(10), "?")  # type: ignore[arg-type]


def test_late_data_that_moves_a_firing_does_not_hold_again_after_a_release() -> None:
    def holds(step: int, fired_step: int, rule: str = "mismatch_rise") -> Observation:
        return replace(observed(step), holds=(OpenSignal(rule, fired_step),))

    log = log_after(holds(41, 41))
    assert [decision.kind for decision in log] == ["hold"]
    log.append(decide_as_operator(fold(log), "release", observed(60), "known"))
    for fired_step in (39, 41, 45, 60):
        assert decide(fold(log), holds(61, fired_step)) == ()
    # Another rule, or the same one after the release, holds.
    assert [each.kind for each in decide(fold(log), holds(61, 45, "clipping"))] == ["hold"]
    assert [each.kind for each in decide(fold(log), holds(62, 61))] == ["hold"]
    # After a rewind the rule fires at a step that the release did not know.
    resumed = [*log, rewind(fold(log), 2, 50, at_us=5)]
    assert [each.kind for each in decide(fold(resumed), replace(holds(56, 55), attempt=2))] == ["hold"]
    # A hold that the detectors released themselves comes back with late data.
    released = log_after(holds(41, 41), observed(60))
    assert [each.kind for each in released] == ["hold", "release"]
    assert [each.kind for each in decide(fold(released), holds(61, 40))] == ["hold"]


def test_second_hold_and_a_halving_at_the_floor_are_refused() -> None:
    log = [decide_as_operator(fold([]), "hold", observed(10), "x")]
    with pytest.raises(AdviceConflictError, match="already held"):
        decide_as_operator(fold(log), "hold", observed(11), "x")
    log = []
    for step in range(4):
        log.append(decide_as_operator(fold(log), "halve", observed(step), "x"))
    with pytest.raises(AdviceConflictError, match="floor"):
        decide_as_operator(fold(log), "halve", observed(5), "x")


def test_rewind_drops_later_decisions_and_revision_increases() -> None:
    log = log_after(observed(114, 110), observed(250, 110, -1.2))
    assert fold(log).scale(251) == pytest.approx(math.exp(-1.2))
    early = [*log, rewind(fold(log), 2, 100, at_us=5)]
    assert fold(early) == AdviceState(attempt=2, revision=3, reason=early[-1].reason, kind="rewind")
    late = [*log, rewind(fold(log), 2, 200, at_us=5)]
    assert [fold(late).scale(step) for step in (197, 198, 251, 396)] == [1.0, 0.5, 0.5, 0.25]
    assert fold(late).last.loop_step is None


def test_hold_survives_a_rewind_from_the_resume_step() -> None:
    log = log_after(observed(114, 110))
    log.append(decide_as_operator(fold(log), "hold", observed(250, 110), "x"))
    log.append(rewind(fold(log), 2, 150, at_us=5))
    state = fold(log)
    assert state.phase(150, warming=False) == "held"
    assert state.scale(5000) == 1.0


def test_mode_decision_does_not_change_the_scale() -> None:
    log = log_after(observed(114, 110))
    assert fold(log).mode is None
    log.append(set_mode(fold(log), "apply", observed(120, 110), "operator"))
    assert fold(log).mode == "apply"
    assert fold(log).scale(198) == 0.5


@pytest.mark.parametrize("held_from", [None, 10_000])
def test_next_decay_step_of_a_schedule_with_very_many_boundaries(held_from: int | None) -> None:
    point = Point(100, boundary=135, period=45, loop=0.5, loop_step=50)
    held = () if held_from is None else (replace(point.from_step(held_from), boundary=None),)
    state = AdviceState(points=(point, *held), factor=0.999, floor=0.0)
    found = state.next_decay_step(200)
    expected = 135 - 45 + 45 * 693
    assert found == (expected if held_from is None else None)
    assert held_from is not None or state.scale(expected) < state.scale(expected - 1) == 0.5
    assert replace(state, points=(replace(point, loop=1.0),)).next_decay_step(200) == 225


class AdviceMachine(RuleBasedStateMachine):
    """A trainer, late data, operators and resumes in any order; ``received`` are the scales of this attempt."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[Decision] = []
        self.attempt = 1
        self.resume_step = 0
        self.observed = -1
        self.trainer = -1
        self.surge: int | None = None
        self.loop = LoopState(static=1e-4)
        self.received: dict[int, float] = {}

    def observation(self) -> Observation:
        return Observation(self.attempt, self.observed, self.trainer, self.surge, at_us=len(self.log), loop=self.loop)

    def append(self, *decisions: Decision) -> None:
        for decision in decisions:
            before = fold(self.log)
            assert decision.revision == before.revision + 1
            self.log.append(parse(Decision, json.loads(json.dumps(to_json(decision)))))
            assert self.log[-1] == decision
            after = fold(self.log)
            assert AdviceState.from_json(json.loads(json.dumps(after.to_json()))) == after
            assert decision.kind == "rewind" or fold_on(before, decision) == after
            if decision.kind in ("rewind", "mode"):
                continue
            first = decision.effective_from_step
            if decision.kind == "loop":
                steps = first - (before.last.loop_step or 0)
                assert steps > 0 or before.loop_reference is None
                rise = LARGEST_RISE * min(max(steps, 0), STEPS_OF_A_RISE)
                assert after.scale(first) <= before.scale(first) * math.exp(rise) + 1e-12
            elif decision.kind != "raise":
                assert [after.scale(step) for step in range(max(first - 300, 0), first)] == [
                    before.scale(step) for step in range(max(first - 300, 0), first)
                ]
                # At most one halving, and no rise but one that the loop has decided before.
                previous = min(before.scale(first - 1), before.scale(first))
                assert max(0.1, previous / 2) <= after.scale(first) <= max(before.scale(first - 1), before.scale(first))
            else:
                assert before.scale(first) < after.scale(first) <= 2 * before.scale(first) + 1e-12

    def decide(self) -> None:
        self.append(*decide(fold(self.log), self.observation()))
        again = decide(fold(self.log), self.observation())
        assert not [decision for decision in again if decision.kind in ("surge", "retract")]

    @rule(steps=st.integers(1, 60), polls=st.integers(0, 3))
    def train(self, steps: int, polls: int) -> None:
        for _ in range(steps):
            self.trainer = max(self.trainer, self.observed, self.resume_step - 1) + 1
            self.received[self.trainer] = fold(self.log).scale(self.trainer)
            if self.trainer - self.observed > polls:
                self.observed = self.trainer - polls
                self.decide()

    @rule(surge=st.one_of(st.none(), st.integers(1, 300)))
    def late_data_moves_the_surge(self, surge: int | None) -> None:
        self.surge = surge if surge is None or surge <= self.observed else None
        self.decide()

    @rule(change=st.floats(-2.0, 2.0), error=st.floats(-2.3, 2.3))
    def loop_moves(self, change: float, error: float) -> None:
        log_scale = min(max(self.loop.log_scale + change, math.log(0.1)), 0.0)
        self.loop = replace(self.loop, driven=1e-2, error=error, log_scale=log_scale)
        self.decide()

    @rule(kind=st.sampled_from(["halve", "raise", "hold", "release"]))
    def operate(self, kind: str) -> None:
        try:
            decision = decide_as_operator(fold(self.log), kind, self.observation(), "because")  # type: ignore[arg-type]
        except AdviceConflictError:
            return
        self.append(decision)

    @precondition(lambda self: self.observed > 0)
    @rule(data=st.data())
    def resume(self, data: st.DataObject) -> None:
        self.resume_step = data.draw(st.integers(max(0, self.observed - 150), self.observed + 1))
        self.attempt += 1
        self.append(rewind(fold(self.log), self.attempt, self.resume_step, at_us=len(self.log)))
        self.observed = self.resume_step - 1
        self.trainer = -1
        self.received = {}
        if self.surge is not None and self.surge >= self.resume_step:
            self.surge = None

    @invariant()
    def scales_are_within_bounds_and_fall_along_the_schedule(self) -> None:
        state = fold(self.log)
        assert state.attempt == self.attempt
        start = self.observation().first_open_step
        ahead = [state.scale(step) for step in range(start, start + 250, 10)]
        assert all(0.1 <= scale <= 1.0 for scale in ahead)
        assert ahead == sorted(ahead, reverse=True)
        if state.held_from_step is not None:
            assert state.scale(start + 5000) == state.scale(start)

    @invariant()
    def next_decay_step_is_where_the_scale_falls(self) -> None:
        state = fold(self.log)
        start = self.observation().first_open_step
        following = state.next_decay_step(start)
        if following is None:
            assert state.scale(start + 5000) == state.scale(start)
        else:
            assert state.scale(following) < state.scale(following - 1) == state.scale(start)


TestAdviceMachine = AdviceMachine.TestCase
TestAdviceMachine.settings = settings(
    max_examples=30, stateful_step_count=20, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


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
