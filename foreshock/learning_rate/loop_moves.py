"""The decisions of the control loop: the next point of its scale, and the sentence that gives the reason."""

from __future__ import annotations

import math
from collections.abc import Sequence

from foreshock.diagnosis.wording import percent
from foreshock.learning_rate.loop import (
    ERROR_OF_A_RULE,
    LARGEST_FALL,
    LARGEST_RISE,
    LEAST_MOVE,
    SILENT_STEPS,
    STEPS_OF_A_RISE,
    LoopSettings,
    LoopState,
)
from foreshock.learning_rate.schedule import HORIZON, LoopPoint, loop_scale


def next_point(
    points: Sequence[LoopPoint],
    reference: float | None,
    state: LoopState,
    settings: LoopSettings,
    step: int,
    applied_floor: float,
) -> tuple[LoopPoint, float, str] | None:
    """Return the loop's scale from ``step`` on, the reference for the next decision, and why; None if it stays.

    The log of the scale moves by the difference of the state's log s from ``reference``, which the last decision
    returned; None: start from now. A decision moves it by at most `LARGEST_FALL` or `LARGEST_RISE` for each step since
    the last, a rise for at most `STEPS_OF_A_RISE`. The rest is left for later decisions: the returned reference is
    behind the state by it. A step that lacks a value raises nothing, and after `SILENT_STEPS` of them a fall that has
    gone beyond the state ends.
    """
    # Between two answers the last fall continues, and a scale below the floor is not applied.
    now = math.log(max(loop_scale(points, step), applied_floor))
    if reference is None:
        reason = "The hold is over: the control loop goes on from the present scale."
        return LoopPoint(step, math.exp(now)), state.log_scale, reason
    last = points[-1] if points else LoopPoint(0, 1.0)
    floor = min(math.log(settings.floor), now)
    wanted = min(max(math.log(last.scale) + state.log_scale - reference, floor), 0.0)
    if state.silent and wanted > now:
        if state.silent < SILENT_STEPS or wanted - now < LEAST_MOVE or not last.is_falling(step) or now <= floor:
            return None
        reason = (
            f"The last {state.silent} steps, up to step {state.step}, lack "
            f"{'an update' if state.driven is not None else 'a measured mismatch'}: the control loop keeps the scale "
            f"at {math.exp(now):.2g} until a step has one."
        )
        return LoopPoint(step, math.exp(now)), state.log_scale - (wanted - now), reason
    # 0 after a decision for the same step: the rest of that one is left for later steps.
    steps = min(max(step - last.step, 0), HORIZON)
    rise = LARGEST_RISE * min(steps, STEPS_OF_A_RISE) if settings.raises else 0.0
    bounded = min(max(wanted, now - LARGEST_FALL * steps), now + rise)
    reaches_end = bounded == wanted and wanted in (floor, 0.0) and abs(bounded - now) > 1e-9
    if abs(bounded - now) < LEAST_MOVE and not reaches_end:
        return None
    rises = bounded > now
    if rises and state.error > 0.0:
        # The fall between two answers went a little too far: no reason to rise.
        return None
    stays = rises or state.silent >= SILENT_STEPS
    point = LoopPoint(step, math.exp(bounded), 0.0 if stays else state.fall(settings))
    return point, state.log_scale - (wanted - bounded), _reason_of_move(state, settings, point.scale, rises=rises)


def _reason_of_move(state: LoopState, settings: LoopSettings, scale: float, *, rises: bool) -> str:
    values = [
        (name, value, point)
        for name, value, point in (
            ("the driven mismatch", state.driven, state.set_point(settings)),
            ("the update", state.update, state.update_point(settings)),
        )
        if value is not None
    ]
    said = [f"{name} is {value:.2g} nats per token (set point {point:.2g})" for name, value, point in values]
    names = state.lowered
    of_a_rule = math.exp(ERROR_OF_A_RULE)
    if names and not rises and all(value <= of_a_rule * point for _, value, point in values):
        fired = f"rule {names[0]} has fired" if len(names) == 1 else f"rules {', '.join(names)} have fired"
        said = [f"{fired} (counts as {of_a_rule:.2g} × a set point)", *said]
    found = " and ".join(said) or f"step {state.step} lacks a measured mismatch"
    left = state.left
    if left is not None and left < settings.cooldown:
        found += f", with {percent(left)} of the planned steps left"
    # The average is bounded below: it does not show how far recent steps are below the set point.
    recent = "are below the set point" if rises else f"count as {math.exp(state.error):.2g} × the set point"
    return (
        f"{found[0].upper()}{found[1:]}; recent steps {recent}: "
        f"the control loop {'raises' if rises else 'lowers'} the scale to {scale:.2g}."
    )
