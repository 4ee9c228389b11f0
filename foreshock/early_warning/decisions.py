"""Advice as an append-only log of decisions, and the state of the learning rate that the log folds to.

What holds, whatever arrives in whatever order:

- within an attempt the scale that a trainer is told only falls from step to step; only an operator raises it;
- a decision changes steps beyond the frontier (the newest step that was closed, polled or acknowledged) and no other,
  so late data changes future boundaries only, and boundaries already past are not caught up;
- one decision halves at most once;
- a rewind drops what was decided from steps at or beyond ``resume_step``; ``revision`` never decreases;
- ``scale = max(floor, schedule × explicit halvings)``; a hold freezes it, and what it skipped is not caught up.

Decisions are reconciled with what the detectors say now, not with when they said it: the same function serves a step
that closes, late data that changes the past, and the first step after a rewind.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from foreshock.early_warning.detectors import OpenSignal
from foreshock.early_warning.schedule import DECAY_FACTOR, DECAY_FLOOR, LengthDecaySchedule, scale_at

DecisionKind = Literal["surge", "retract", "rule_halving", "halve", "raise", "hold", "release", "rewind", "mode"]
OperatorKind = Literal["halve", "raise", "hold", "release"]
Mode = Literal["shadow", "apply"]
Phase = Literal["warming", "watching", "decaying", "floor", "held"]
Author = Literal["detector", "operator", "trainer"]

RULE_HALVING_GAP = 20
"""Steps between a halving and the next one by a rule: a lower learning rate needs some steps to show."""

# A rewind takes back what was concluded from steps that no longer exist. What a person switched stays switched.
_SURVIVES_REWIND: frozenset[DecisionKind] = frozenset({"hold", "release", "mode"})


class AdviceConflictError(ValueError):
    """An operator's decision that makes no sense now, such as releasing what is not held."""


@dataclass(frozen=True, slots=True)
class Decision:
    """One entry of the log. ``observed_step`` is the newest closed step it was made from (−1: none)."""

    revision: int
    attempt: int
    kind: DecisionKind
    observed_step: int
    effective_from_step: int
    reason: str
    at_us: int
    author: Author = "detector"
    schedule: LengthDecaySchedule | None = None
    signal: OpenSignal | None = None
    mode: Mode | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "revision": self.revision,
            "attempt": self.attempt,
            "kind": self.kind,
            "observed_step": self.observed_step,
            "effective_from_step": self.effective_from_step,
            "reason": self.reason,
            "at_us": self.at_us,
            "author": self.author,
            "schedule": self.schedule and self.schedule.to_json(),
            "signal": self.signal and {"rule": self.signal.rule, "fired_step": self.signal.fired_step},
            "mode": self.mode,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Decision:
        schedule, signal = value["schedule"], value["signal"]
        return cls(
            **{
                **value,
                "schedule": schedule and LengthDecaySchedule.from_json(schedule),
                "signal": signal and OpenSignal(signal["rule"], signal["fired_step"]),
            }
        )


@dataclass(frozen=True, slots=True)
class AdviceState:
    """What the log says now.

    ``halvings`` are the steps of explicit halvings, ascending; with ``schedule`` they give the scale of any step (of
    past ones only as far back as the last raise). ``answered`` are the signals that have had their halving.
    ``mode`` is None until it was switched for the first time.
    """

    attempt: int = 1
    revision: int = 0
    schedule: LengthDecaySchedule | None = None
    halvings: tuple[int, ...] = ()
    answered: tuple[OpenSignal, ...] = ()
    held_from_step: int | None = None
    mode: Mode | None = None
    reason: str = ""

    def scale(self, step: int) -> float:
        """η(step) / η₀ as advised; a run in shadow is told 1.0 instead."""
        return scale_at(self.schedule, self.halvings, step)

    @property
    def floor(self) -> float:
        return self.schedule.floor if self.schedule is not None else DECAY_FLOOR

    def next_decay_step(self, step: int) -> int | None:
        """The next step at which the scale falls, as far as is decided; None at the floor or while held."""
        if self.scale(step) <= self.floor:
            return None
        ahead = [halving for halving in self.halvings if halving > step]
        boundary = self.schedule.next_boundary(step) if self.schedule is not None else None
        return min([*ahead, *([boundary] if boundary is not None else [])], default=None)

    def last_halving(self, step: int) -> int | None:
        """The newest boundary at or before ``step``, or explicit halving that is decided at all."""
        boundaries = self.schedule.boundaries_until(step) if self.schedule is not None else ()
        return max([*boundaries, *self.halvings], default=None)

    def phase(self, step: int, warming: bool) -> Phase:
        """``warming`` says that the detectors have no baseline yet."""
        if self.held_from_step is not None:
            return "held"
        if self.scale(step) <= self.floor:
            return "floor"
        if self.schedule is not None or self.halvings:
            return "decaying"
        return "warming" if warming else "watching"


@dataclass(frozen=True, slots=True)
class Observation:
    """What is known when deciding: the surviving history's newest closed step, how far the trainer is known to be (by
    its polls and acknowledgements), and what the detectors say. −1 stands for no step."""

    attempt: int
    observed_step: int
    trainer_step: int
    surge_step: int | None
    signals: tuple[OpenSignal, ...]
    at_us: int

    @property
    def first_free_step(self) -> int:
        """The first step that no trainer has been told a scale for."""
        return max(self.observed_step, self.trainer_step) + 1


def fold(log: Iterable[Decision]) -> AdviceState:
    """The state after ``log``, which is in order of revision."""
    surviving: list[Decision] = []
    revision, attempt, reason = 0, 1, ""
    for decision in log:
        revision, attempt, reason = decision.revision, decision.attempt, decision.reason
        if decision.kind == "rewind":
            resume_step = decision.effective_from_step
            surviving = [_rewound(kept, resume_step) for kept in surviving if _survives(kept, resume_step)]
        else:
            surviving.append(decision)
    state = AdviceState()
    for decision in surviving:
        state = _apply(state, decision)
    return replace(state, revision=revision, attempt=attempt, reason=reason)


def decide(log: Sequence[Decision], observation: Observation) -> tuple[Decision, ...]:
    """What the detectors' present word adds to the log: at most a new schedule and one halving by a rule."""
    state = fold(log)
    decisions: list[Decision] = []
    surge = _reconcile_surge(state, observation)
    if surge is not None:
        decisions.append(surge)
        state = fold([*log, surge])
    halving = _halve_by_rule(state, observation)
    if halving is not None:
        decisions.append(halving)
    return tuple(decisions)


def rewind(log: Sequence[Decision], attempt: int, resume_step: int, at_us: int) -> Decision:
    """The decision that begins attempt ``attempt`` at ``resume_step``."""
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
    """The decision that switches the run to ``mode``; it leaves the advised scale as it is."""
    reason = "The advice is shown, the trainer is told 1.0." if mode == "shadow" else "The trainer is told the advice."
    return replace(_new(fold(log), observation, "mode", reason), mode=mode, author=author)


def decide_as_operator(log: Sequence[Decision], kind: OperatorKind, observation: Observation, reason: str) -> Decision:
    """An operator's decision. Raises AdviceConflictError where it would change nothing."""
    state = fold(log)
    scale = state.scale(observation.first_free_step)
    held = state.held_from_step is not None
    if kind == "hold" and held:
        raise AdviceConflictError("the learning rate is held already")
    if kind == "release" and not held:
        raise AdviceConflictError("the learning rate is not held")
    if kind == "halve" and scale <= state.floor:
        raise AdviceConflictError(f"the scale is at its floor of {state.floor:g} already")
    if kind == "raise" and scale >= 1.0:
        raise AdviceConflictError("the scale is 1 already: the base learning rate is the trainer's")
    return replace(_new(state, observation, kind, reason), author="operator")


def _new(state: AdviceState, observation: Observation, kind: DecisionKind, reason: str) -> Decision:
    return Decision(
        revision=state.revision + 1,
        attempt=observation.attempt,
        kind=kind,
        observed_step=observation.observed_step,
        effective_from_step=observation.first_free_step,
        reason=reason,
        at_us=observation.at_us,
    )


def _reconcile_surge(state: AdviceState, observation: Observation) -> Decision | None:
    known = state.schedule.surge_step if state.schedule is not None else None
    if observation.surge_step == known:
        return None
    if observation.surge_step is None:
        reason = f"The surge at step {known} does not stand any more: no further halvings; what was done stays done."
        return _new(state, observation, "retract", reason)
    schedule = LengthDecaySchedule.from_surge(observation.surge_step)
    first = observation.first_free_step
    if state.schedule is not None:
        # A period that moves a little must not halve again right after the old boundary: that is the same boundary.
        last = max(state.schedule.boundaries_until(first - 1), default=None)
        if last is not None:
            first = max(first, last + schedule.decay_period // 2 + 1)
    reason = (
        f"Response lengths surged at step {observation.surge_step}: "
        f"the learning rate halves every {schedule.decay_period} steps."
    )
    return replace(_new(state, observation, "surge", reason), schedule=schedule.effective_from(first))


def _halve_by_rule(state: AdviceState, observation: Observation) -> Decision | None:
    first = observation.first_free_step
    if state.held_from_step is not None or state.scale(first) <= state.floor:
        return None
    last = state.last_halving(first)
    if last is not None and first <= last + RULE_HALVING_GAP:
        return None
    for signal in observation.signals:
        if signal not in state.answered:
            reason = f"Rule {signal.rule} stands since step {signal.fired_step}: the learning rate halves once."
            return replace(_new(state, observation, "rule_halving", reason), signal=signal)
    return None


def _survives(decision: Decision, resume_step: int) -> bool:
    return decision.kind in _SURVIVES_REWIND or decision.observed_step < resume_step


def _rewound(decision: Decision, resume_step: int) -> Decision:
    """A person's switch from a dropped step applies from the step that the run resumes at."""
    if decision.kind in _SURVIVES_REWIND and decision.effective_from_step > resume_step:
        return replace(decision, effective_from_step=resume_step)
    return decision


def _apply(state: AdviceState, decision: Decision) -> AdviceState:
    first = decision.effective_from_step
    match decision.kind:
        case "surge" | "retract":
            schedule = decision.schedule
            if schedule is not None and state.held_from_step is not None:
                schedule = schedule.paused_from(state.held_from_step)
            return replace(state, halvings=_explicit(state, first - 1), schedule=schedule)
        case "rule_halving" | "halve":
            answered = state.answered if decision.signal is None else (*state.answered, decision.signal)
            return replace(state, halvings=tuple(sorted((*state.halvings, first))), answered=answered)
        case "raise":
            return replace(state, halvings=_raised(state, first), schedule=_from(state.schedule, first + 1, state))
        case "hold":
            paused = state.schedule.paused_from(first) if state.schedule is not None else None
            # A halving may lie ahead where a rewind has moved the hold back before it.
            halvings = tuple(halving for halving in state.halvings if halving <= first)
            return replace(state, held_from_step=first, schedule=paused, halvings=halvings)
        case "release":
            halvings = _explicit(state, first - 1)
            released = state.schedule.effective_from(first) if state.schedule is not None else None
            return replace(state, halvings=halvings, schedule=released, held_from_step=None)
        case "mode":
            return replace(state, mode=decision.mode or state.mode)
        case "rewind":
            raise AssertionError("a rewind is resolved before decisions are applied")


def _explicit(state: AdviceState, step: int) -> tuple[int, ...]:
    """The explicit halvings with the schedule's boundaries up to ``step`` made explicit too."""
    boundaries = state.schedule.boundaries_until(step) if state.schedule is not None else ()
    return tuple(sorted((*state.halvings, *boundaries)))


def _raised(state: AdviceState, first: int) -> tuple[int, ...]:
    """As many of the oldest halvings as leave the scale one halving above what it is at ``first``."""
    halvings, scale = _explicit(state, first), state.scale(first)
    factor = state.schedule.factor if state.schedule is not None else DECAY_FACTOR
    kept = len(halvings)
    while kept > 0 and max(state.floor, factor**kept) <= scale:
        kept -= 1
    return halvings[:kept]


def _from(schedule: LengthDecaySchedule | None, step: int, state: AdviceState) -> LengthDecaySchedule | None:
    if schedule is None:
        return None
    schedule = schedule.effective_from(step)
    return schedule if state.held_from_step is None else schedule.paused_from(min(step, state.held_from_step))
