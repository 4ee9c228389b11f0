"""Decisions of the learning-rate advice: by the detectors, by an operator, by a resumed trainer.

The detectors' decisions reconcile the log with the detectors' current state, however that state was reached: the same
function serves a step that closes, late data that changes the past, and the first step after a rewind.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from foreshock.early_warning.advice_state import AdviceState, Author, Decision, DecisionKind, Mode, fold
from foreshock.early_warning.detectors import OpenSignal
from foreshock.early_warning.schedule import LengthDecaySchedule, ScheduleSettings, lowering

OperatorKind = Literal["halve", "raise", "hold", "release"]

RULE_HALVING_GAP = 20
"""Steps between a halving and the next one by a rule: a lower learning rate needs some steps to take effect."""


class AdviceConflictError(ValueError):
    """An operator's decision that would change nothing, such as a release without a hold."""


@dataclass(frozen=True, slots=True)
class Observation:
    """The input of a decision: the newest closed step of the active history, the trainer's newest step (by its polls
    and acknowledgements), and the detectors' results. −1 means no step."""

    attempt: int
    observed_step: int
    trainer_step: int
    surge_step: int | None
    signals: tuple[OpenSignal, ...]
    at_us: int
    schedule: ScheduleSettings = field(default_factory=ScheduleSettings)
    holds: tuple[OpenSignal, ...] = ()

    @property
    def first_open_step(self) -> int:
        """The first step whose scale no trainer has received yet."""
        return max(self.observed_step, self.trainer_step) + 1


def decide(log: Sequence[Decision], observation: Observation) -> tuple[Decision, ...]:
    """Return the decisions that the detectors' state adds to the log: at most one of each kind."""
    decisions: list[Decision] = []
    for reconcile in (_reconcile_surge, _reconcile_hold, _halve_by_rule):
        decision = reconcile(fold([*log, *decisions]), observation)
        if decision is not None:
            decisions.append(decision)
    return tuple(decisions)


def rewind(log: Sequence[Decision], attempt: int, resume_step: int, at_us: int) -> Decision:
    """Return the decision that starts attempt ``attempt`` at ``resume_step``."""
    return Decision(
        revision=fold(log).revision + 1,
        attempt=attempt,
        kind="rewind",
        observed_step=resume_step - 1,
        effective_from_step=resume_step,
        reason=f"Attempt {attempt} resumes at step {resume_step}: decisions from later steps are dropped.",
        at_us=at_us,
        author="trainer",
    )


def set_mode(log: Sequence[Decision], mode: Mode, observation: Observation, author: Author) -> Decision:
    """Return the decision that switches the run to ``mode``; the advised scale does not change."""
    reason = "Shadow mode: the advice is shown, the trainer gets 1.0."
    if mode == "apply":
        reason = "Apply mode: the trainer gets the advised scale."
    return replace(_new(fold(log), observation, "mode", reason), mode=mode, author=author)


def decide_as_operator(log: Sequence[Decision], kind: OperatorKind, observation: Observation, reason: str) -> Decision:
    """Return an operator's decision. Raises AdviceConflictError if it would change nothing."""
    state = fold(log)
    scale = state.scale(observation.first_open_step)
    held = state.held_from_step is not None
    if kind == "hold" and held:
        raise AdviceConflictError("the learning rate is already held; release it first")
    if kind == "release" and not held:
        raise AdviceConflictError("the learning rate is not held; only a hold can be released")
    if kind == "halve" and scale <= state.floor:
        raise AdviceConflictError(f"the scale is already at its floor of {state.floor:g}; it cannot be halved")
    if kind == "raise" and scale >= 1.0:
        raise AdviceConflictError("the scale is already 1; raise the base learning rate in the trainer")
    return replace(_new(state, observation, kind, reason), author="operator")


def _new(state: AdviceState, observation: Observation, kind: DecisionKind, reason: str) -> Decision:
    return Decision(
        revision=state.revision + 1,
        attempt=observation.attempt,
        kind=kind,
        observed_step=observation.observed_step,
        effective_from_step=observation.first_open_step,
        reason=reason,
        at_us=observation.at_us,
    )


def _reconcile_surge(state: AdviceState, observation: Observation) -> Decision | None:
    known = state.schedule.surge_step if state.schedule is not None else None
    if observation.surge_step == known:
        return None
    if observation.surge_step is None:
        reason = f"The surge at step {known} is retracted: no further halvings; past halvings stay."
        return _new(state, observation, "retract", reason)
    chosen = observation.schedule
    if state.schedule is not None or state.halvings:
        # Halvings of another depth would change the scale of the past, and could raise it.
        chosen = replace(chosen, factor=state.factor, floor=state.floor)
    schedule = LengthDecaySchedule.from_surge(observation.surge_step, chosen)
    first = observation.first_open_step
    if state.schedule is not None:
        # A slightly different period must not halve again right after the old boundary: it is the same boundary.
        last = max(state.schedule.boundaries_until(first - 1), default=None)
        if last is not None:
            first = max(first, last + schedule.decay_period // 2 + 1)
    reason = (
        f"Response lengths surged at step {observation.surge_step}: "
        f"the learning rate {lowering(schedule.factor)} every {schedule.decay_period} steps."
    )
    return replace(_new(state, observation, "surge", reason), schedule=schedule.effective_from(first))


def _reconcile_hold(state: AdviceState, observation: Observation) -> Decision | None:
    """Hold while a rule with that effect fires; a hold or a release by an operator stands."""
    if state.held_from_step is None:
        for signal in observation.holds:
            if signal not in state.handled:
                reason = f"Rule {signal.rule} fires since step {signal.fired_step}: the learning rate is held."
                return replace(_new(state, observation, "hold", reason), signal=signal)
    elif state.held_by == "detector" and not observation.holds:
        return _new(state, observation, "release", "No rule that holds the learning rate fires any more.")
    return None


def _halve_by_rule(state: AdviceState, observation: Observation) -> Decision | None:
    first = observation.first_open_step
    if state.held_from_step is not None or state.scale(first) <= state.floor:
        return None
    last = state.last_halving(first)
    if last is not None and first <= last + RULE_HALVING_GAP:
        return None
    for signal in observation.signals:
        if signal not in state.handled:
            reason = f"Rule {signal.rule} fires since step {signal.fired_step}: the learning rate halves once."
            return replace(_new(state, observation, "rule_halving", reason), signal=signal)
    return None
