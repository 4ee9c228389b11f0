"""The log of advice decisions: the state that it folds to, and new decisions by detectors, operators and trainers.

Guarantees, for events in any order of arrival:

- within an attempt the scale of later steps only falls, with two exceptions: the control loop may slowly take back what
  it lowered itself, and an operator may raise the scale;
- a decision changes only steps beyond the newest step that was closed, polled or acknowledged, so late data changes
  future boundaries only, and past boundaries are not caught up;
- one decision halves at most once;
- the factor and the floor are those of the first decision that lowers the scale, as long as that has any effect;
- a rewind drops decisions made from steps at or beyond ``resume_step``, and the others are in force from there at the
  latest; ``revision`` never decreases;
- ``scale = max(floor, min(loop, factor ** halvings))``; a hold freezes it, and skipped boundaries are not caught up;
- the levers beside the rate have points, holds and a mode of their own; a rewind that goes back to the proposed
  checkpoint keeps the correction;
- the loop moves with the detectors' `LoopState`, at most `largest_fall` or `LARGEST_RISE` a step; the rest follows in
  later steps, so late data, a hold, an operator's decision or a change of mode never makes it jump.

A decision on the rate adds one `Point`, which says all that is in force from its step on: it is the last point with a
few fields replaced.

The detectors' decisions reconcile the log with the detectors' current state, however that state was reached: the same
function serves a step that closes, late data that changes the past, and the first step after a rewind.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, astuple, dataclass, field, fields, replace
from functools import reduce
from typing import Any, Final

from foreshock.api.records import parse
from foreshock.diagnosis.detectors import OpenSignal
from foreshock.diagnosis.wording import percent
from foreshock.learning_rate.advice import AdvicePhase, DecisionKind, OperatorKind
from foreshock.learning_rate.control_loop import (
    ERROR_OF_A_RULE,
    LARGEST_RISE,
    SILENT_STEPS,
    LoopSettings,
    LoopState,
)
from foreshock.learning_rate.length_decay import (
    DECAY_FACTOR,
    DECAY_FLOOR,
    HORIZON,
    Point,
    Schedule,
    ScheduleSettings,
    lowering,
    next_fall,
    point_at,
)
from foreshock.learning_rate.levers import UNMOVED, Correction, LeverState, Rollback, Value
from foreshock.learning_rate.modes import AdviceMode, Author, BesideTheRate, Lever
from foreshock.learning_rate.remedy import Remedy

STEPS_OF_A_RISE: Final = 2
"""One decision raises log s by at most so many steps' rises, however long ago the last one was: it never jumps up."""

LEAST_MOVE: Final = 0.05
"""Smallest move of log s that is a decision, unless it reaches the floor or 1."""

# Of log s.
_ROUNDING = 1e-9

# A rewind drops conclusions from steps that no longer exist; an operator's switches stay.
_KEPT_BY_REWIND: frozenset[DecisionKind] = frozenset({"hold", "release", "mode"})


@dataclass(frozen=True, slots=True)
class Decision:
    """One entry of the log. ``observed_step`` is the newest closed step at the decision (−1: none).

    ``from_step`` is the step from which boundaries of the ``schedule`` of a surge count; ``scale`` and ``fall`` are the
    loop's, from ``effective_from_step`` on.
    """

    revision: int
    attempt: int
    kind: DecisionKind
    observed_step: int
    effective_from_step: int
    reason: str
    at_us: int
    author: Author = "detector"
    schedule: Schedule | None = None
    from_step: int = 0
    signal: OpenSignal | None = None
    mode: AdviceMode | None = None
    lever: Lever = "rate"
    value: Value | None = None
    """For `set`, the lever's value from ``effective_from_step`` on; for `mode`, the correction that is asked for."""
    scale: float = 1.0
    fall: float = 0.0
    loop_reference: float | None = None
    """The log s of the detectors' loop up to which the decision followed; the next one moves by the difference from
    it."""


@dataclass(frozen=True, slots=True)
class AdviceState:
    """The state of the advice after a log of decisions.

    ``points``, ascending, give the scale of any step; ``schedule`` is that of the surge, also during a hold.
    ``handled`` are the signals that already caused a hold, and ``released`` their rules with the newest step that an
    operator knew when releasing the hold. ``loop_reference`` is that of the newest loop decision; None after a hold:
    the loop then continues from the present scale. ``mode`` is None until it is set.
    """

    attempt: int = 1
    revision: int = 0
    schedule: Schedule | None = None
    points: tuple[Point, ...] = ()
    handled: tuple[OpenSignal, ...] = ()
    released: tuple[OpenSignal, ...] = ()
    held_from_step: int | None = None
    held_by: Author | None = None
    mode: AdviceMode | None = None
    reason: str = ""
    kind: DecisionKind | None = None
    """The kind of the newest decision, whose reason ``reason`` is."""
    factor: float = DECAY_FACTOR
    floor: float = DECAY_FLOOR
    loop_reference: float | None = 0.0
    operated: tuple[int, DecisionKind, str] | None = None
    """Revision, kind and reason of an operator's newest decision on the rate."""
    correction: LeverState = UNMOVED
    rollback: LeverState = UNMOVED
    rolled_back: tuple[int, ...] = ()
    """The steps to which the run went back by a proposed rollback."""

    def lever(self, name: BesideTheRate) -> LeverState:
        """Return a lever beside the rate."""
        return self.correction if name == "correction" else self.rollback

    def to_json(self) -> dict[str, Any]:
        """Return the state as JSON; points and signals are lists of their fields."""
        lists = {name: [astuple(each) for each in getattr(self, name)] for name in ("points", "handled", "released")}
        return asdict(replace(self, points=(), handled=(), released=())) | lists

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> AdviceState:
        """Return the state of `to_json`. Raises an error of any kind for a state of another release."""
        if value.keys() != {each.name for each in fields(cls)}:
            raise ValueError("the state of the advice has other fields")
        kinds: dict[str, type] = {"points": Point, "handled": OpenSignal, "released": OpenSignal}
        lists = {name: [kind(*each) for each in value[name]] for name, kind in kinds.items()}
        return parse(cls, {**value, **lists})

    def scale(self, step: int) -> float:
        """Return the advised η(step) / η₀; in shadow mode the trainer gets 1.0 instead."""
        return point_at(self.points, step).scale(step, self.factor, self.floor)

    @property
    def last(self) -> Point:
        """The newest point."""
        return self.points[-1] if self.points else Point()

    @property
    def is_lowered(self) -> bool:
        """Return whether a halving or the control loop has lowered the scale, and it is not taken back."""
        return self.last.halvings > 0 or self.last.loop < 1.0

    def next_decay_step(self, step: int) -> int | None:
        """Return the next step at which the scale falls by present decisions; None at the floor or while held."""
        return next_fall(self.points, step, self.factor, self.floor)

    def phase(self, step: int, warming: bool) -> AdvicePhase:
        """Return the phase at ``step``. ``warming`` is true while the detectors have no baseline."""
        if self.held_from_step is not None:
            return "held"
        if self.scale(step) <= self.floor:
            return "floor"
        if self.schedule is not None or self.last.halvings or self.scale(step) < 1.0:
            return "decaying"
        return "warming" if warming else "watching"


def fold(log: Iterable[Decision]) -> AdviceState:
    """Return the state after ``log``, which is in order of revision."""
    active: list[Decision] = []
    whole = AdviceState()
    rolled_back: list[int] = []
    for decision in log:
        whole = _noted(whole, decision)
        if decision.kind == "rewind":
            resume_step = decision.effective_from_step
            proposed = reduce(_apply, active, AdviceState()).rollback.last
            goes_back = isinstance(proposed, Rollback) and abs(proposed.step - resume_step) <= 1
            rolled_back += [resume_step] * goes_back
            active = [
                replace(kept, effective_from_step=min(kept.effective_from_step, resume_step))
                for kept in active
                # What an operator set stays, as it holds the lever.
                if kept.kind in _KEPT_BY_REWIND
                or (kept.kind == "set" and kept.author == "operator")
                or kept.observed_step < resume_step
                or (goes_back and kept.lever == "correction")
            ]
        else:
            active.append(decision)
    noted = {name: getattr(whole, name) for name in ("revision", "attempt", "reason", "kind", "operated")}
    return replace(reduce(_apply, active, AdviceState()), **noted, rolled_back=tuple(rolled_back))


def fold_on(state: AdviceState, decision: Decision) -> AdviceState:
    """Return the state after one more decision. It is not a rewind, which drops decisions and needs the log."""
    return _noted(_apply(state, decision), decision)


def _noted(state: AdviceState, newest: Decision) -> AdviceState:
    if newest.lever != "rate":
        return replace(state, revision=newest.revision, attempt=newest.attempt)
    operated = (newest.revision, newest.kind, newest.reason) if newest.author == "operator" else state.operated
    state = replace(state, revision=newest.revision, attempt=newest.attempt, operated=operated)
    return replace(state, reason=newest.reason, kind=newest.kind)


def _apply(state: AdviceState, decision: Decision) -> AdviceState:
    if decision.lever == "correction":
        return replace(state, correction=_applied(state.correction, decision))
    if decision.lever == "rollback":
        return replace(state, rollback=_applied(state.rollback, decision))
    first, schedule = decision.effective_from_step, state.schedule
    point = state.last.from_step(first)
    match decision.kind:
        case "surge" | "retract":
            schedule = decision.schedule
            held = state.held_from_step is not None
            point = _resumed(point, None if held else schedule, max(first, decision.from_step))
            state = replace(state, schedule=schedule)
            if schedule is not None:
                state = replace(state, factor=schedule.factor, floor=schedule.floor)
            elif not point.halvings:
                # After a retraction the past halvings stay as deep as they were. If the loop was below one of the two
                # floors, changing the floor would move the scale at once.
                lowest = min((each.loop_at(each.step + HORIZON) for each in state.points), default=1.0)
                stays = lowest < max(state.floor, DECAY_FLOOR)
                state = replace(state, factor=DECAY_FACTOR, floor=state.floor if stays else DECAY_FLOOR)
        case "halve":
            point = _scaled(replace(point, halvings=point.halvings + 1), state.factor, state.floor)
        case "raise":
            later = point.from_step(first + 1)
            point = replace(later, step=first, halvings=_raised(state, later.halvings))
            point = _scaled(point, 1.0 / state.factor, state.floor)
        case "loop":
            point = replace(point, loop=decision.scale, loop_step=first, fall=decision.fall)
            state = replace(state, loop_reference=decision.loop_reference)
        case "hold":
            point = _scaled(replace(point, boundary=None), 1.0, state.floor)
            handled = state.handled if decision.signal is None else (*state.handled, decision.signal)
            state = replace(state, held_from_step=first, held_by=decision.author, handled=handled)
        case "release":
            point = _resumed(point, schedule, first)
            if decision.author == "operator":
                # A rewind may have moved the release back.
                known = min(decision.observed_step, first - 1)
                state = replace(state, released=tuple(OpenSignal(each.rule, known) for each in state.handled))
            state = replace(state, held_from_step=None, held_by=None, loop_reference=None)
        case "mode":
            starts = decision.mode == "apply" and state.mode != "apply" and point.loop_step is not None
            state = replace(state, mode=decision.mode or state.mode)
            if not starts:
                return state
            # Until now the trainer had the whole rate: the loop falls from there, step by step.
            point = replace(point, loop=1.0, loop_step=first, fall=0.0)
            state = replace(state, loop_reference=0.0)
        case "rewind" | "set":
            raise AssertionError("fold() resolves rewinds before it applies decisions, and the rate has no `set`")
    earlier = state.points[:-1] if state.last.step == first else state.points
    return replace(state, points=(*earlier, point))


def _applied(lever: LeverState, decision: Decision) -> LeverState:
    """Return a lever beside the rate after a decision on it. What an operator sets is held."""
    first, is_operator = decision.effective_from_step, decision.author == "operator"
    if is_operator:
        lever = replace(lever, operated=(decision.revision, decision.kind, decision.reason))
    lever = replace(lever, reason=decision.reason)
    match decision.kind:
        case "set":
            lever = lever.with_value(first, decision.value)
            return replace(lever, held_from_step=first, held_by="operator") if is_operator else lever
        case "hold":
            return replace(lever, held_from_step=first, held_by=decision.author)
        case "release":
            return replace(lever, held_from_step=None, held_by=None)
        case "mode":
            asked = decision.value if isinstance(decision.value, Correction) else lever.asked
            chosen = lever.mode_is_chosen or decision.mode is not None
            return replace(lever, mode=decision.mode or lever.mode, asked=asked, mode_is_chosen=chosen)
        case _:
            raise AssertionError(f"{decision.kind} is a decision on the rate")


def _resumed(point: Point, schedule: Schedule | None, step: int) -> Point:
    """Return the point with the schedule's boundaries from ``step`` on as the only ones."""
    if schedule is None:
        return replace(point, boundary=None)
    return replace(point, boundary=schedule.boundary(step), period=schedule.decay_period)


def _scaled(point: Point, factor: float, floor: float) -> Point:
    """Return the point with the loop's scale multiplied, which falls no further; unchanged until the loop has moved."""
    if point.loop_step is None:
        return point
    scale = max(point.loop_at(point.step), floor) * factor
    return replace(point, loop=min(max(scale, floor), 1.0), loop_step=point.step, fall=0.0)


def _raised(state: AdviceState, halvings: int) -> int:
    """Return a smaller number of halvings, with which the scale is higher by one of them."""
    scale = max(state.floor, state.factor**halvings)
    while halvings > 0 and max(state.floor, state.factor**halvings) <= scale:
        halvings -= 1
    return halvings


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
    at_us: int
    schedule: ScheduleSettings = field(default_factory=ScheduleSettings)
    holds: tuple[OpenSignal, ...] = ()
    loop: LoopState | None = None
    loop_settings: LoopSettings = field(default_factory=LoopSettings)
    remedy: Remedy | None = None

    @property
    def first_open_step(self) -> int:
        """The first step whose scale no trainer has received yet."""
        return max(self.observed_step, self.trainer_step) + 1


def decide(state: AdviceState, observation: Observation) -> tuple[Decision, ...]:
    """Return the decisions that the detectors' state adds to the log: at most one of each kind and lever."""
    decisions: list[Decision] = []
    for reconcile in (_reconcile_surge, _reconcile_hold, _move_loop, _set_correction, _set_rollback):
        decision = reconcile(state, observation)
        if decision is not None:
            decisions.append(decision)
            state = fold_on(state, decision)
    return tuple(decisions)


def rewind(state: AdviceState, attempt: int, resume_step: int, at_us: int) -> Decision:
    """Return the decision that starts attempt ``attempt`` at ``resume_step``."""
    reason = f"Attempt {attempt} resumes at step {resume_step}: decisions from later steps are dropped."
    resumed = Observation(attempt, resume_step - 1, resume_step - 1, None, at_us)
    return replace(_new(state, resumed, "rewind", reason), author="trainer")


def set_mode(
    state: AdviceState,
    mode: AdviceMode | None,
    observation: Observation,
    author: Author,
    lever: Lever = "rate",
    asked: Correction | None = None,
) -> Decision:
    """Return the decision that switches a lever to ``mode``, and asks for a correction."""
    value = {"rate": "scale", "correction": "correction", "rollback": "checkpoint to go back to"}[lever]
    reason = f"Shadow mode: the advice is shown, the trainer gets {'1.0' if lever == 'rate' else 'none'}."
    if mode == "apply":
        reason = f"Apply mode: the trainer gets the advised {value}."
    if mode is None and asked is not None:
        reason = f"The trainer asks for {asked.words} if a correction is advised."
    return replace(_new(state, observation, "mode", reason), mode=mode, author=author, lever=lever, value=asked)


def decide_as_operator(
    state: AdviceState,
    kind: OperatorKind,
    observation: Observation,
    reason: str,
    seen_revision: int | None = None,
    lever: Lever = "rate",
    value: Value | None = None,
) -> Decision:
    """Return an operator's decision. `value` is that of `set`, after which the lever is held.

    Raises AdviceConflictError if it would change nothing, or if an operator has decided after `seen_revision`: a form
    that is sent twice, or by two operators, is one decision. The detectors' revisions do not count, as they may come
    at each step.
    """
    of_lever = state if lever == "rate" else state.lever(lever)
    if of_lever.operated is not None and seen_revision is not None and of_lever.operated[0] > seen_revision:
        _, decided, why = of_lever.operated
        raise AdviceConflictError(
            f"an operator has decided since you saw it ({decided}, {why!r}); "
            "look at the advice as it is now, and decide again if you still want it"
        )
    scale = state.scale(observation.first_open_step)
    held, name = of_lever.held_from_step is not None, "learning rate" if lever == "rate" else lever
    if kind not in _OF_LEVERS[lever == "rate"]:
        raise AdviceConflictError(f"the {name} has no {kind}; it has {', '.join(_OF_LEVERS[lever == 'rate'])}")
    if kind == "hold" and held:
        raise AdviceConflictError(f"the {name} is already held; release it first")
    if kind == "release" and not held:
        raise AdviceConflictError(f"the {name} is not held; only a hold can be released")
    if kind == "halve" and scale <= state.floor:
        raise AdviceConflictError(f"the scale is already at its floor of {state.floor:g}; it cannot be halved")
    if kind == "raise" and scale >= 1.0:
        raise AdviceConflictError("the scale is already 1; raise the base learning rate in the trainer")
    return replace(_new(state, observation, kind, reason), author="operator", lever=lever, value=value)


_OF_LEVERS: dict[bool, tuple[OperatorKind, ...]] = {
    True: ("hold", "release", "halve", "raise"),
    False: ("hold", "release", "set"),
}
"""The operator's decisions on the rate, and on another lever."""


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
    if state.schedule is not None or state.last.halvings:
        # Halvings of another depth would change the scale of the past, and could raise it.
        chosen = replace(chosen, factor=state.factor, floor=state.floor)
    first = observation.first_open_step
    # A floor above the present scale would raise the scale.
    chosen = replace(chosen, floor=min(chosen.floor, state.scale(first)))
    schedule = Schedule.from_surge(observation.surge_step, chosen)
    if state.schedule is not None:
        # A slightly different period must not halve again right after the old boundary: it is the same boundary.
        last = state.schedule.boundary(first) - state.schedule.decay_period
        if point_at(state.points, last).count(last) > point_at(state.points, last - 1).count(last - 1):
            first = max(first, last + schedule.decay_period // 2 + 1)
    reason = (
        f"Response lengths surged at step {observation.surge_step}: "
        f"the learning rate {lowering(schedule.factor)} every {schedule.decay_period} steps."
    )
    return replace(_new(state, observation, "surge", reason), schedule=schedule, from_step=first)


def _reconcile_hold(state: AdviceState, observation: Observation) -> Decision | None:
    """Hold while a rule with that effect fires; an operator's hold or release has precedence."""
    if state.held_from_step is None:
        for signal in observation.holds:
            # Late data may move the firing of a rule that an operator released.
            released = max((each.fired_step for each in state.released if each.rule == signal.rule), default=-1)
            if signal not in state.handled and signal.fired_step > released:
                reason = f"Rule {signal.rule} fires since step {signal.fired_step}: the learning rate is held."
                return replace(_new(state, observation, "hold", reason), signal=signal)
    elif state.held_by == "detector" and not observation.holds:
        return _new(state, observation, "release", "No rule that holds the learning rate fires any more.")
    return None


def _set_correction(state: AdviceState, observation: Observation) -> Decision | None:
    """Switch on the remedy's correction; an operator's hold has precedence."""
    known, remedy = state.correction, observation.remedy
    if remedy is None or known.held_from_step is not None or remedy.correction in (None, known.last):
        return None
    return replace(_new(state, observation, "set", remedy.why), lever="correction", value=remedy.correction)


def _set_rollback(state: AdviceState, observation: Observation) -> Decision | None:
    """Propose the remedy's rollback, or none any more; an operator's hold has precedence."""
    known, remedy = state.rollback, observation.remedy
    if remedy is None or known.held_from_step is not None or remedy.rollback == known.last:
        return None
    reason = remedy.why if remedy.rollback is not None else "The reward is back: no rollback is proposed any more."
    return replace(_new(state, observation, "set", reason), lever="rollback", value=remedy.rollback)


def _move_loop(state: AdviceState, observation: Observation) -> Decision | None:
    settings, first = observation.loop_settings, observation.first_open_step
    if observation.loop is None or not settings.enabled or state.held_from_step is not None:
        return None
    moved = next_point(state.last, state.loop_reference, observation.loop, settings, first, state.floor)
    if moved is None:
        return None
    scale, fall, reference, reason = moved
    return replace(_new(state, observation, "loop", reason), scale=scale, fall=fall, loop_reference=reference)


def next_point(
    last: Point,
    reference: float | None,
    state: LoopState,
    settings: LoopSettings,
    step: int,
    applied_floor: float,
) -> tuple[float, float, float, str] | None:
    """Return the loop's scale from ``step`` on and its fall, the reference for the next decision, and why.

    None if it stays.

    The log of the scale moves by the difference of the state's log s from ``reference``, which the last decision
    returned; None: start from now. A decision moves it by at most `largest_fall` or `LARGEST_RISE` for each step since
    the last, a rise for at most `STEPS_OF_A_RISE`. The rest is left for later decisions: the returned reference is
    behind the state by it. A step that lacks a value raises nothing, and after `SILENT_STEPS` of them a fall that has
    gone beyond the state ends.
    """
    # Between two answers the last fall continues, and a scale below the floor is not applied.
    now = math.log(max(last.loop_at(step), applied_floor))
    if reference is None:
        reason = "The hold is over: the control loop goes on from the present scale."
        return math.exp(now), 0.0, now, reason
    floor = min(math.log(settings.floor), now)
    wanted = min(max(math.log(last.loop) + state.log_scale - reference, floor), 0.0)
    if wanted > -_ROUNDING:
        wanted = 0.0
    elif state.cools(settings):
        end = math.log(max((state.left or 0.0) / settings.cooldown, settings.floor))
        if state.log_scale > end:
            # The rate in force bounds the state, from which it is far off if the whole rate was never in force.
            wanted = min(wanted, max(end, floor))
    if state.silent and wanted > now:
        if state.silent < SILENT_STEPS or wanted - now < LEAST_MOVE or not last.is_falling(step) or now <= floor:
            return None
        reason = (
            f"The last {state.silent} steps, up to step {state.step}, lack "
            f"{'an update' if state.driven is not None else 'a measured mismatch'}: the control loop keeps the scale "
            f"at {math.exp(now):.2g} until a step has one."
        )
        return math.exp(now), 0.0, state.log_scale - (wanted - now), reason
    # 0 after a decision for the same step: the rest of that one is left for later steps.
    steps = min(max(step - (last.loop_step or 0), 0), HORIZON)
    rise = LARGEST_RISE * min(steps, STEPS_OF_A_RISE) if settings.raises else 0.0
    bounded = min(max(wanted, now - state.largest_fall * steps), now + rise)
    reaches_end = bounded == wanted and wanted in (floor, 0.0) and abs(bounded - now) > _ROUNDING
    if abs(bounded - now) < LEAST_MOVE and not reaches_end:
        return None
    rises = bounded > now
    if rises and state.error > 0.0:
        # The fall between two answers went a little too far. The scale does not rise for that.
        return None
    stays = rises or state.silent >= SILENT_STEPS
    scale, fall = math.exp(bounded), 0.0 if stays else state.fall(settings)
    return scale, fall, state.log_scale - (wanted - bounded), _reason_of_move(state, settings, scale, rises=rises)


def _reason_of_move(state: LoopState, settings: LoopSettings, scale: float, *, rises: bool) -> str:
    driven = "the driven mismatch", state.driven, state.set_point(settings)
    update = "the update", state.update, state.update_point(settings)
    values = [(name, value, point) for name, value, point in (driven, update) if value is not None]
    said = [f"{name} is {value:.2g} nats per token (set point {point:.2g})" for name, value, point in values]
    names = state.lowered
    of_a_rule = math.exp(ERROR_OF_A_RULE)
    if names and not rises and all(value <= of_a_rule * point for _, value, point in values):
        fired = f"rule {names[0]} has fired" if len(names) == 1 else f"rules {', '.join(names)} have fired"
        said = [f"{fired} (counts as {of_a_rule:.2g} × a set point)", *said]
    found = " and ".join(said) or f"step {state.step} lacks a measured mismatch"
    # The average is bounded below: it does not show how far recent steps are below the set point.
    recent = f"count as {math.exp(state.error):.2g} × the set point"
    if rises or state.error <= 0.0:
        recent = "are below the set point"
    if not rises and state.cools(settings):
        recent += f", and {percent(state.left or 0.0)} of the planned steps are left"
    return (
        f"{found[0].upper()}{found[1:]}; recent steps {recent}: "
        f"the control loop {'raises' if rises else 'lowers'} the scale to {scale:.2g}."
    )
