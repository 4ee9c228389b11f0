"""The law of the control loop: hold what the learning rate drives at its set points.

After each closed step, ``log s ← clip(log s − gain · EMA(error), log floor, 0)``; the error is the log of the larger
ratio of a value to its set point. Two values follow the rate:

- the driven part of the mismatch, in nats per token: k3 minus the static part, for tokens that lag behind the trainer.
  At lag 0 there is none: a mismatch of equal weights does not follow the rate;
- the update: k3 of the policy after the step's update against the one before (`update_k3`), in nats per token. The
  first updates, for which the optimizer has no moments yet, have a higher set point. One of them that is beyond twice
  its set point lowers the rate at once: it may destroy the policy before an average moves, and as the k3 of an update
  grows with the square of the rate, its ratio to the set point tells how far.

The static part is numerics, which no rate changes: k3 at lag 0, and that of the first step of a run, before any update.
If neither is known, all of k3 counts as driven. With an unknown lag the response decides: what has not halved while
the rate was really at the floor is static from then on. A firing rule with the effect "halve" counts as twice a set
point; so does a fallen reward in a run that logs no update.

The state never runs away from the trainer: log s is at most two falls below the rate in force, so that a trainer that
does not follow (shadow mode, a hold) finds the loop at its own rate. If the last step is planned, a scale below 1 falls
to the floor in the last steps, as nothing averages out the noise of the last updates; a scale of 1 is left alone.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

LARGEST_FACTOR: Final = 10.0
"""A larger ratio of a value to its set point counts as this: a single token can make k3 a million times the usual."""

ERROR_OF_A_RULE: Final = math.log(2.0)
"""A firing rule with the effect "halve" counts as twice a set point."""

SMALLEST: Final = 1e-9
"""Nats per token. A smaller k3 is a rounding error."""

LARGEST_RISE: Final = 0.06
"""Largest rise of log s in a step: from the floor to 1 takes at least 39 steps."""

LARGEST_FALL: Final = 0.25
"""Largest fall of log s in a step: about the largest error times the gain. From 1 to 0.1 takes at least 10 steps."""

LARGEST_FIRST_FALL: Final = math.log(LARGEST_FACTOR)
"""The same for one of the first updates: from 1 to 0.1."""

PATIENCE: Final = 10
"""Readings at the floor that judge whether a mismatch follows the rate, after as many that wait for the lag."""

FIRST_UPDATES: Final = 8
"""The first updates are larger, since the optimizer has no moments yet, and do not predict later ones."""

FIRST_UPDATES_MULTIPLE: Final = 5.0
"""Factor on the update's set point for the first updates."""

SILENT_STEPS: Final = 2
"""After so many steps in a row without a value, no fall goes on. A single one may only wait for its scalars."""

SET_LENGTH: Final = 16.0
"""Tokens. For longer responses the set point falls with the square root of the length: at 128 tokens the same k3 of a
token did more harm than at 12, that of a response less. Longer ones were not measured."""

FEWEST_TOKENS: Final = 200
"""Fewest tokens of a k3 that is read: with fewer, a single token can make all of it."""


@dataclass(frozen=True, slots=True)
class LoopSettings:
    """The gains of the loop, chosen on the tuning seeds of docs/closed-loop.md."""

    set_point: float = 1.5e-2
    """Set point of the driven part, in nats per token, for responses of up to `SET_LENGTH` tokens."""
    update_set_point: float = 2e-3
    """Set point of the update, in nats per token."""
    cooldown: float = 0.8
    """Fraction of the planned steps, at the end, over which a lowered scale falls to the floor."""
    gain: float = 0.1
    """Change of log s in a step, for each unit of the error."""
    weight: float = 0.2
    """Weight of the newest reading in the moving averages: of the error, the static and the driven part."""
    floor: float = 0.1
    raises: bool = True  # Whether the loop takes back what it has lowered itself.
    enabled: bool = True

    def __post_init__(self) -> None:
        for name in ("set_point", "update_set_point", "cooldown", "gain", "weight"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0.0):
                raise ValueError(f"{name} must be above 0, got {value}")
            if "set_point" not in name and value > 1.0:
                raise ValueError(f"{name} must be at most 1, got {value}")
        if not 0.0 < self.floor <= 1.0:
            raise ValueError(f"floor must satisfy 0 < floor <= 1, got {self.floor}")


DEFAULT_LOOP: Final = LoopSettings()
DRIVEN_SET_POINTS: Final = ("set_point",)  # In units of k3, whose healthy range differs between kinds of models.


@dataclass(frozen=True, slots=True)
class Reading:
    """The loop's input from a closed step; None: not measured.

    ``k3`` is of all tokens and ``k3_at_lag_0`` of those at lag 0, in nats per token; ``length`` the mean length of a
    response. ``lag`` is the mean lag in steps; ``rate`` the learning rate of the step. ``update`` is k3 of the policy
    after the step's update against the one before, on the step's rollouts. ``lowered`` are the firing rules that lower
    the rate. ``last_step`` is the last one that the trainer plans.
    """

    k3: float | None = None
    lag: float | None = None
    k3_at_lag_0: float | None = None
    update: float | None = None
    rate: float | None = None
    tokens: float | None = None
    lowered: tuple[str, ...] = ()
    step: int = 0
    last_step: float | None = None
    length: float | None = None


@dataclass(frozen=True, slots=True)
class LoopState:
    """The state after a step. ``static``, ``driven`` and ``update`` are in nats per token, None if unknown.

    ``follows`` is false once the driven part was seen not to follow the rate; ``lowered`` are the rules that lower it.
    """

    static: float | None = None
    measured_static: bool = False
    """Whether the static part was measured: at lag 0, or before the first update."""
    driven: float | None = None
    update: float | None = None
    length: float | None = None
    average: float | None = None
    """Moving average of the driven part."""
    error: float = 0.0
    """Moving average of the error."""
    log_scale: float = 0.0
    before: float | None = None
    """The average of the driven part at the last step with more than half of the highest rate."""
    at_floor: tuple[float, ...] = ()
    """The driven parts since then with the rate at the floor, fewer than twice `PATIENCE`."""
    follows: bool = True
    updates: int = 0
    highest_rate: float | None = None
    step: int = 0
    last_step: float | None = None
    """The newest plan of the trainer."""
    lowered: tuple[str, ...] = ()
    silent: int = 0
    """Number of newest steps in a row that moved nothing because they lack a value; at most `SILENT_STEPS`."""

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> LoopState:
        return cls(**{**value, "at_floor": tuple(value["at_floor"]), "lowered": tuple(value["lowered"])})

    @property
    def left(self) -> float | None:
        """The fraction of the planned steps that is left; None without a plan, or beyond its end."""
        if self.last_step is None or self.step > self.last_step:
            return None
        return min((self.last_step - self.step) / self.last_step, 1.0)

    @property
    def is_first(self) -> bool:
        return 0 < self.updates <= FIRST_UPDATES

    @property
    def largest_fall(self) -> float:
        """The largest fall of log s in a step."""
        return LARGEST_FIRST_FALL if self.is_first else LARGEST_FALL

    def set_point(self, settings: LoopSettings) -> float:
        """Return the set point of the driven part: at least the static part, which drifts as a policy learns."""
        shorter = min(SET_LENGTH / self.length, 1.0) if self.length else 1.0
        return max(settings.set_point * math.sqrt(shorter), self.static or 0.0)

    def update_point(self, settings: LoopSettings) -> float:
        """Return the set point of the newest update, in nats per token."""
        return settings.update_set_point * (FIRST_UPDATES_MULTIPLE if self.is_first else 1.0)

    def fall(self, settings: LoopSettings) -> float:
        """Return by how much log s falls in the next step if nothing changes; 0 if it would rise."""
        return settings.gain * max(self.error, 0.0)

    def cools(self, settings: LoopSettings) -> bool:
        """Return whether the scale is bounded by the planned end."""
        return self.log_scale < 0.0 and self.left is not None and self.left < settings.cooldown

    def only_cools(self, settings: LoopSettings) -> bool:
        """Return whether the scale is low only for the planned end, and nothing is beyond its set point."""
        within = (self.average or 0.0) <= self.set_point(settings)
        return within and (self.update or 0.0) <= self.update_point(settings) and self.cools(settings)


def advance_loop(state: LoopState, reading: Reading, settings: LoopSettings) -> LoopState:
    """Return the state after a closed step. A step without a reading changes nothing, so that it raises nothing."""
    if not settings.enabled:
        return state
    reading = _checked(reading)
    planned = reading.last_step is not None and reading.last_step > 0.0
    state = replace(state, step=reading.step, last_step=reading.last_step if planned else state.last_step)
    state = _with_driven(state, reading, settings)
    errors = [ERROR_OF_A_RULE] if reading.lowered else []
    if state.driven is not None:
        errors.append(math.log(max(state.driven, SMALLEST) / state.set_point(settings)))
    of_update = math.log(max(state.update or 0.0, SMALLEST) / state.update_point(settings))
    if state.update is not None:
        errors.append(of_update)
    # The driven part or the update is missing, while earlier steps had it: the other one is not enough.
    lacks_a_value = (state.driven is None and state.average is not None) or (state.update is None and state.updates > 0)
    if not errors or (max(errors) <= 0.0 and lacks_a_value):
        return replace(state, silent=min(state.silent + 1, SILENT_STEPS))
    error = min(max(*errors, -math.log(LARGEST_FACTOR)), math.log(LARGEST_FACTOR))
    average = state.error + settings.weight * (error - state.error)
    if error <= 0.0:
        # The average forgets a large error slowly: the scale would fall on for ten steps.
        average = min(average, 0.0)
    # Bounded below: there the scale already rises as fast as it may, and a lower average would delay the next fall.
    average = max(average, -LARGEST_RISE / settings.gain)
    change = min(-settings.gain * average, LARGEST_RISE if settings.raises else 0.0)
    if of_update > ERROR_OF_A_RULE and state.is_first:
        change = min(change, -min(0.5 * of_update, LARGEST_FIRST_FALL))
    moved = min(state.log_scale + change, 0.0)
    state = replace(state, error=average, log_scale=moved, lowered=reading.lowered, silent=0)
    return _judge_response(_bounded(state, reading, settings), reading, settings)


def _checked(reading: Reading) -> Reading:
    """Return the reading without values that are not measurements.

    These are a k3 of few tokens or below 0, a k3 of lagging tokens that is exactly 0, an update that is not above 0.
    """
    k3, at_lag_0 = (None if (each or 0.0) < -SMALLEST else each for each in (reading.k3, reading.k3_at_lag_0))
    if k3 is not None and reading.tokens is not None and reading.tokens < FEWEST_TOKENS:
        k3 = None
    if k3 is not None and k3 <= 0.0 and reading.lag != 0.0:
        # μ was logged in place of π, as in bypass mode.
        k3 = None
    moved = reading.update is not None and reading.update > 0.0
    return replace(reading, k3=k3, k3_at_lag_0=at_lag_0, update=reading.update if moved else None)


def _with_driven(state: LoopState, reading: Reading, settings: LoopSettings) -> LoopState:
    before_updates = reading.step <= 1 and state.average is None and state.highest_rate is None
    is_static = reading.lag == 0.0 or (reading.lag is None and before_updates)
    at_lag_0 = reading.k3 if is_static else reading.k3_at_lag_0
    old = state.static
    if at_lag_0 is not None:
        static = min(at_lag_0, LARGEST_FACTOR * max(old or 0.0, settings.set_point))
        if old is not None and state.measured_static:
            static = old + settings.weight * (static - old)
        state = replace(state, static=static, measured_static=True)
    elif old is not None and reading.k3 is not None and reading.k3 < old / LARGEST_FACTOR:
        # k3 contains the static part, so that this one was a spike.
        state = replace(state, static=old + settings.weight * (reading.k3 - old))
    driven, average = None, state.average
    if reading.k3 is not None:
        driven = 0.0 if is_static else max(reading.k3 - (state.static or 0.0), 0.0)
        average = driven if average is None else average + settings.weight * (driven - average)
    updates = state.updates + (reading.update is not None)
    length = reading.length or state.length
    return replace(state, driven=driven, average=average, update=reading.update, updates=updates, length=length)


def _bounded(state: LoopState, reading: Reading, settings: LoopSettings) -> LoopState:
    """Bound log s by the floor, by the planned end, and by the rate in force, which follows a step or two later."""
    moved = state.log_scale
    if state.cools(settings):
        moved = min(moved, math.log(max((state.left or 0.0) / settings.cooldown, settings.floor)))
    if reading.rate is not None and reading.rate > 0.0:
        highest = max(reading.rate, state.highest_rate or 0.0)
        state = replace(state, highest_rate=highest)
        moved = max(moved, min(math.log(reading.rate / highest) - 2.0 * state.largest_fall, 0.0))
    return replace(state, log_scale=max(moved, math.log(settings.floor)))


def _judge_response(state: LoopState, reading: Reading, settings: LoopSettings) -> LoopState:
    """Count the driven part as static if the rate has really fallen to the floor and the driven part has not halved.

    Not if lag and static part are known. Without a logged rate, or in shadow mode, nothing can respond.
    """
    known = reading.lag is not None and state.measured_static
    if known or state.average is None or state.driven is None or not reading.rate or state.highest_rate is None:
        return state
    if reading.rate > state.highest_rate / 2:
        return replace(state, before=state.average, at_floor=())
    if state.before is None or reading.rate > 2.0 * settings.floor * state.highest_rate:
        return state
    at_floor = (*state.at_floor, state.driven)
    if len(at_floor) < 2 * PATIENCE:
        return replace(state, at_floor=at_floor)
    usual = statistics.median(at_floor[PATIENCE:])
    if usual <= max(state.before / 2, state.set_point(settings)):
        return replace(state, at_floor=())
    static = (state.static or 0.0) + usual
    return replace(state, static=static, driven=0.0, average=0.0, error=0.0, before=None, at_floor=(), follows=False)
