"""Tests of the advice decisions: single cases, then a state machine with events in any order."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from foreshock.diagnosis.detectors import OpenSignal
from foreshock.learning_rate.decisions import (
    AdviceConflictError,
    AdviceState,
    Decision,
    Observation,
    decide,
    decide_as_operator,
    fold,
    rewind,
    set_mode,
)
from foreshock.learning_rate.schedule import ScheduleSettings


def observed(
    step: int, surge: int | None = None, signals: tuple[OpenSignal, ...] = (), trainer: int = -1
) -> Observation:
    return Observation(1, step, trainer, surge, signals, at_us=1_000 + step)


def log_after(*observations: Observation) -> list[Decision]:
    log: list[Decision] = []
    for observation in observations:
        log.extend(decide(log, observation))
    return log


RUNAWAY = OpenSignal("mismatch_runaway", 40)


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
        # Retracted; then a rule halves; then another surge, under other constants.
        observed(250, None),
        observed(260, None, (RUNAWAY,)),
        replace(observed(300, 290, (RUNAWAY,)), schedule=ScheduleSettings(factor=0.9, floor=0.05)),
    )
    states = [fold(log[:count]) for count in range(1, len(log) + 1)]
    assert [decision.kind for decision in log] == ["surge", "retract", "rule_halving", "surge"]
    assert [state.scale(250) for state in states] == [0.8] * 4
    assert [state.scale(261) for state in states[2:]] == pytest.approx([0.64, 0.64])
    assert [(state.factor, state.floor) for state in states] == [(0.8, 0.4)] * 4
    # A surge that was retracted before it lowered anything leaves nothing.
    early = fold(log_after(replace(observed(114, 110), schedule=mild), observed(150, None)))
    assert (early.factor, early.floor, early.halvings) == (0.5, 0.1, ())
    # After a halving by a rule the schedule is as deep as that one.
    halved = log_after(observed(60, None, (RUNAWAY,)), replace(observed(114, 110, (RUNAWAY,)), schedule=mild))
    assert (fold(halved).factor, fold(halved).floor, fold(halved).scale(114)) == (0.5, 0.1, 0.5)


def test_rule_halves_once_per_signal() -> None:
    log = log_after(*(observed(step, None, (RUNAWAY,)) for step in range(40, 120)))
    assert [(decision.kind, decision.effective_from_step) for decision in log] == [("rule_halving", 41)]
    assert fold(log).scale(41) == 0.5


def test_two_signals_halve_one_after_the_other_with_a_gap() -> None:
    signals = (RUNAWAY, OpenSignal("other", 41))
    log = log_after(*(observed(step, None, signals) for step in range(41, 120)))
    assert [decision.effective_from_step for decision in log] == [42, 63]


def test_rule_does_not_halve_right_after_a_boundary_of_the_schedule() -> None:
    log = log_after(observed(114, 110), *(observed(step, 110, (RUNAWAY,)) for step in range(198, 240)))
    assert [decision.effective_from_step for decision in log if decision.kind == "rule_halving"] == [219]


def test_rules_stop_at_the_floor() -> None:
    signals = [OpenSignal("r", step) for step in range(0, 1000, 50)]
    log = log_after(*(observed(signal.fired_step, None, (signal,)) for signal in signals))
    assert len(log) == 4
    assert fold(log).scale(1000) == 0.1


def test_hold_freezes_and_release_does_not_catch_up() -> None:
    log = log_after(observed(114, 110))
    log.append(decide_as_operator(log, "hold", observed(150, 110), "evaluation week"))
    held = fold(log)
    assert [held.scale(step) for step in (150, 198, 396, 5000)] == [1.0] * 4
    assert held.phase(150, warming=False) == "held"
    assert held.next_decay_step(150) is None
    log.extend(decide(log, observed(160, 110, (RUNAWAY,))))
    assert fold(log) == held
    log.append(decide_as_operator(log, "release", observed(400, 110), "over"))
    state = fold(log)
    assert [state.scale(step) for step in (198, 400, 593, 594)] == [1.0, 1.0, 1.0, 0.5]


def test_only_an_operator_raises_and_one_halving_at_a_time() -> None:
    log = log_after(observed(114, 110), observed(450, 110))
    log.append(decide_as_operator(log, "raise", observed(450, 110), "the reward does not rise"))
    state = fold(log)
    assert [state.scale(step) for step in (451, 593, 594)] == [0.5, 0.5, 0.25]


def test_raise_from_the_floor_raises_the_scale() -> None:
    log = log_after(observed(114, 110), observed(3000, 110))
    log.append(decide_as_operator(log, "raise", observed(3000, 110), "try"))
    assert fold(log).scale(3001) == 0.125


@pytest.mark.parametrize("kind", ["release", "raise"])
def test_decision_without_effect_is_refused(kind: str) -> None:
    with pytest.raises(AdviceConflictError):
        decide_as_operator([], kind, observed(10), "?")  # type: ignore[arg-type]


def test_second_hold_and_a_halving_at_the_floor_are_refused() -> None:
    log = [decide_as_operator([], "hold", observed(10), "x")]
    with pytest.raises(AdviceConflictError, match="already held"):
        decide_as_operator(log, "hold", observed(11), "x")
    log = []
    for step in range(4):
        log.append(decide_as_operator(log, "halve", observed(step), "x"))
    with pytest.raises(AdviceConflictError, match="floor"):
        decide_as_operator(log, "halve", observed(5), "x")


def test_rewind_drops_later_decisions_and_revision_increases() -> None:
    log = log_after(observed(114, 110), observed(250, 110, (RUNAWAY,)))
    assert fold(log).scale(251) == 0.25
    early = [*log, rewind(log, 2, 100, at_us=5)]
    assert fold(early) == AdviceState(attempt=2, revision=3, reason=early[-1].reason)
    late = [*log, rewind(log, 2, 200, at_us=5)]
    assert [fold(late).scale(step) for step in (197, 198, 251, 396)] == [1.0, 0.5, 0.5, 0.25]
    assert fold(late).handled == ()


def test_firing_rule_halves_again_after_a_rewind() -> None:
    log = log_after(observed(45, None, (RUNAWAY,)))
    log.append(rewind(log, 2, 43, at_us=5))
    log.extend(decide(log, replace(observed(43, None, (RUNAWAY,)), attempt=2)))
    assert [decision.kind for decision in log] == ["rule_halving", "rewind", "rule_halving"]
    assert fold(log).scale(44) == 0.5


def test_hold_survives_a_rewind_from_the_resume_step() -> None:
    log = log_after(observed(114, 110))
    log.append(decide_as_operator(log, "hold", observed(250, 110), "x"))
    log.append(rewind(log, 2, 150, at_us=5))
    state = fold(log)
    assert state.phase(150, warming=False) == "held"
    assert state.scale(5000) == 1.0


def test_mode_decision_does_not_change_the_scale() -> None:
    log = log_after(observed(114, 110))
    assert fold(log).mode is None
    log.append(set_mode(log, "apply", observed(120, 110), "operator"))
    assert fold(log).mode == "apply"
    assert fold(log).scale(198) == 0.5


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
        self.signals: tuple[OpenSignal, ...] = ()
        self.received: dict[int, float] = {}
        self.allowed_rise = False

    def observation(self) -> Observation:
        return Observation(self.attempt, self.observed, self.trainer, self.surge, self.signals, at_us=len(self.log))

    def append(self, *decisions: Decision) -> None:
        for decision in decisions:
            before = fold(self.log)
            assert decision.revision == before.revision + 1
            self.log.append(Decision.from_json(json.loads(json.dumps(decision.to_json()))))
            assert self.log[-1] == decision
            after = fold(self.log)
            if decision.kind in ("rewind", "mode"):
                continue
            first = decision.effective_from_step
            if decision.kind != "raise":
                assert [after.scale(step) for step in range(max(first - 300, 0), first)] == [
                    before.scale(step) for step in range(max(first - 300, 0), first)
                ]
                # At most one halving, and never a rise.
                previous = min(before.scale(first - 1), before.scale(first))
                assert max(0.1, previous / 2) <= after.scale(first) <= before.scale(first - 1)
            else:
                assert before.scale(first) < after.scale(first) <= 2 * before.scale(first) + 1e-12

    def decide(self) -> None:
        self.append(*decide(self.log, self.observation()))
        again = decide(self.log, self.observation())
        assert not [decision for decision in again if decision.kind in ("surge", "retract")]

    @rule(steps=st.integers(1, 60), polls=st.integers(0, 3))
    def train(self, steps: int, polls: int) -> None:
        for _ in range(steps):
            self.trainer = max(self.trainer, self.observed, self.resume_step - 1) + 1
            self.received[self.trainer] = fold(self.log).scale(self.trainer)
            previous = self.received.get(self.trainer - 1)
            if previous is not None and not self.allowed_rise:
                assert self.received[self.trainer] <= previous
            self.allowed_rise = False
            if self.trainer - self.observed > polls:
                self.observed = self.trainer - polls
                self.decide()

    @rule(surge=st.one_of(st.none(), st.integers(1, 300)))
    def late_data_moves_the_surge(self, surge: int | None) -> None:
        self.surge = surge if surge is None or surge <= self.observed else None
        self.decide()

    @rule(names=st.sets(st.sampled_from("abc")))
    def rules_fire_or_clear(self, names: set[str]) -> None:
        known = {signal.rule: signal for signal in self.signals}
        self.signals = tuple(known.get(name, OpenSignal(name, max(self.observed, 0))) for name in sorted(names))
        self.decide()

    @rule(kind=st.sampled_from(["halve", "raise", "hold", "release"]))
    def operate(self, kind: str) -> None:
        try:
            decision = decide_as_operator(self.log, kind, self.observation(), "because")  # type: ignore[arg-type]
        except AdviceConflictError:
            return
        self.allowed_rise = self.allowed_rise or kind == "raise"
        self.append(decision)

    @precondition(lambda self: self.observed > 0)
    @rule(data=st.data())
    def resume(self, data: st.DataObject) -> None:
        self.resume_step = data.draw(st.integers(max(0, self.observed - 150), self.observed + 1))
        self.attempt += 1
        self.append(rewind(self.log, self.attempt, self.resume_step, at_us=len(self.log)))
        self.observed = self.resume_step - 1
        self.trainer = -1
        self.received = {}
        if self.surge is not None and self.surge >= self.resume_step:
            self.surge = None
        self.signals = tuple(signal for signal in self.signals if signal.fired_step < self.resume_step)

    @invariant()
    def scales_are_within_bounds_and_fall_along_the_schedule(self) -> None:
        state = fold(self.log)
        assert state.attempt == self.attempt
        start = max(self.trainer, self.observed, 0)
        ahead = [state.scale(step) for step in range(start, start + 250, 10)]
        assert all(0.1 <= scale <= 1.0 for scale in ahead)
        assert ahead == sorted(ahead, reverse=True)
        if state.held_from_step is not None:
            # Only an operator's halving can still lie ahead.
            last = max([self.observation().first_open_step, *state.halvings])
            assert state.scale(last + 5000) == state.scale(last)

    @invariant()
    def next_decay_step_is_where_the_scale_falls(self) -> None:
        state = fold(self.log)
        start = max(self.trainer, self.observed, 0)
        following = state.next_decay_step(start)
        if following is None:
            assert state.scale(start + 5000) == state.scale(start)
        else:
            assert state.scale(following) < state.scale(following - 1) == state.scale(start)


TestAdviceMachine = AdviceMachine.TestCase
TestAdviceMachine.settings = settings(
    max_examples=60, stateful_step_count=20, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
