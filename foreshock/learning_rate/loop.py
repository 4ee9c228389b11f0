"""The control loop: hold what the learning rate drives at a set point.

After each closed step, ``log s ← clip(log s − gain · EMA(error), log floor, 0)``. Two things follow the rate, each in
nats per token with a set point of its own, and the error is the log of the larger ratio of value to set point:

- the driven part of the mismatch: k3 of tokens that lag behind the trainer, minus the static part. At lag 0 there is
  none: a mismatch of equal weights does not follow the learning rate;
- the update: k3 of the policy after the step's update against the one before (`update_k3`), if the trainer logs it.
  The first eight updates, for which the optimizer has no moments yet, have five times the set point.

The static part is the k3 of lag 0: numerics, which no rate changes. A run has it at its first step, before the first
update. If lag is unknown, or was never 0, it is the median of the first readings instead; then the response decides: if
the rate has fallen to the floor and the driven part has not halved, it was not driven and counts as static from then
on. Ten readings in a row below a tenth of the static part refute it, and their median takes its place. The set point of
the driven part is at least `static_multiple` times the static part: numerics drift as a policy learns, and a smaller
driven part hardly matters.

Later updates average out the noise of early ones; nothing averages out that of the last ones. If the trainer logs the
last step that it plans, the set point of the driven part is higher in the first steps. Over the cooldown before the
last step it falls to the usual one, and further if the scale is below 1.

Everything is a function of the closed steps in their order; there is no clock.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

LARGEST_FACTOR: Final = 10.0
"""Largest ratio of a value to its set point, or to the static part; a larger one counts as this: k3 has no upper bound,
and a single token can make it a million times the usual one. A reading that is smaller than the static part by a larger
factor cannot contain it."""
LARGEST_ERROR: Final = math.log(LARGEST_FACTOR)

ERROR_OF_A_RULE: Final = math.log(2.0)
"""A firing rule with the effect "halve" counts as twice a set point."""

SMALLEST: Final = 1e-9
"""Nats per token. A smaller k3 is a rounding error."""

LARGEST_RISE: Final = 0.03
"""Largest rise of log s in a step: from the floor to 1 takes at least 77 steps."""

STEPS_OF_A_RISE: Final = 2
"""One decision raises log s by at most so many steps' rises, however long ago the last one was: it never jumps up."""

BASELINE_READINGS: Final = 10
"""Readings whose median is the static part if lag 0 is never seen, or if the one that was measured is refuted."""

LARGEST_FALL: Final = 0.25
"""Largest fall of log s in a step: about the largest error times the gain. From 1 to 0.1 takes at least 10 steps."""

LEAST_MOVE: Final = 0.05
"""Smallest move of log s that is a decision, unless it reaches the floor or 1."""

PATIENCE: Final = 10
"""Readings at the floor after which the driven part must have halved if it follows the learning rate."""

WEIGHT_OF_PARTS: Final = 0.2
"""Weight of the newest step in the moving averages of the static and the driven part."""

FIRST_UPDATES: Final = 8
"""The first updates are larger, since the optimizer has no moments yet, and do not predict later ones."""

FIRST_UPDATES_MULTIPLE: Final = 5.0
"""Factor on the update's set point for the first updates: they are over before the scale could fall for them."""

WEIGHT_OF_FULL_UPDATE: Final = 0.05
"""Weight of the newest update in a geometric average: one update may be ten times another."""

LEAST_LEFT: Final = 0.5
"""Fraction of the highest rate; from a lower rate the update at the highest one is not extrapolated."""

UPDATE_EXPONENT: Final = 1.5
"""The update grows with the rate to this power in the recorded runs; a single small step would give 2."""

COOLDOWN_POWER: Final = 3.0
"""The set point falls with this power of the steps left. As the mismatch grows with the rate to the power of 1.5, the
rate falls with their square."""

FIRST_STEPS: Final = 90
"""Steps for which the set point was above the usual one in the runs of 150 steps that it was chosen on. Longer runs
were not measured."""

SILENT_STEPS: Final = 2
"""After so many steps in a row without a value, no fall continues by itself. A single one may only wait for its
scalars."""

FEWEST_TOKENS: Final = 200
"""A k3 of fewer tokens is no reading: a single token can make all of it."""


@dataclass(frozen=True, slots=True)
class LoopSettings:
    """The gains of the loop, chosen on the tuning seeds of docs/closed-loop.md."""

    set_point: float = 6e-3
    """Set point of the driven part, in nats per token, if no last step is planned."""
    first_set_point: float = 2e-2
    """The same in the first steps of a run whose last step is planned, at most `FIRST_STEPS`."""
    last_set_point: float = 1e-3
    """The same at the end of such a run, if the scale is below 1."""
    cooldown: float = 0.6
    """Fraction of the planned steps, at the end, in which the set point falls with the cube of the steps left."""
    update_set_point: float = 2e-3
    """Set point of the update, in nats per token."""
    gain: float = 0.1
    """Change of log s in a step, for each unit of the error."""
    weight: float = 0.2
    """Weight of the newest reading in the moving average of the error."""
    static_multiple: float = 3.0
    floor: float = 0.1
    raises: bool = True
    """Whether the loop takes back what it has lowered itself."""
    enabled: bool = True

    def __post_init__(self) -> None:
        for name in (
            "set_point", "first_set_point", "last_set_point", "cooldown", "update_set_point", "gain", "weight",
            "static_multiple",
        ):  # fmt: skip
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0.0):
                raise ValueError(f"{name} must be above 0, got {value}")
        for name in ("gain", "weight", "cooldown"):
            if getattr(self, name) > 1.0:
                raise ValueError(f"{name} must be at most 1, got {getattr(self, name)}")
        if not 0.0 < self.floor <= 1.0:
            raise ValueError(f"floor must satisfy 0 < floor <= 1, got {self.floor}")


DEFAULT_LOOP: Final = LoopSettings()
DRIVEN_SET_POINTS: Final = ("set_point", "first_set_point", "last_set_point")
"""Settings in units of k3, whose healthy range differs between kinds of models."""


@dataclass(frozen=True, slots=True)
class Reading:
    """The loop's input from a closed step; None: not measured.

    ``k3`` is of all tokens and ``k3_at_lag_0`` of those at lag 0, in nats per token. ``lag`` is the mean lag in steps;
    ``rate`` the learning rate of the step. ``update`` is k3 of the policy after the step's update against the one
    before, on the step's rollouts. ``lowered`` are the rules with the effect "halve" that fire. ``last_step`` is the
    last one that the trainer plans.
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


@dataclass(frozen=True, slots=True)
class Response:
    """The test whether the driven part follows the rate: both when the scale left 1, the driven parts at the floor
    since."""

    driven: float
    rate: float | None
    at_floor: tuple[float, ...] = ()

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Response:
        return cls(value["driven"], value["rate"], tuple(value["at_floor"]))


@dataclass(frozen=True, slots=True)
class LoopState:
    """The state after a step. ``static``, ``driven`` and ``update`` are in nats per token, None if unknown."""

    static: float | None = None
    measured_static: bool = False
    """Whether the static part was measured at lag 0."""
    baseline: tuple[float, ...] = ()
    driven: float | None = None
    update: float | None = None
    average: float | None = None
    """Moving average of the driven part."""
    error: float = 0.0
    """Moving average of the error."""
    log_scale: float = 0.0
    response: Response | None = None
    follows: bool = True
    """False once the driven part was seen not to follow the learning rate."""
    full_update: float | None = None
    """Moving average of the update as it would be at the highest rate so far, `highest_rate`."""
    updates: int = 0
    highest_rate: float | None = None
    step: int = 0
    last_step: float | None = None
    """The newest plan of the trainer."""
    lowered: tuple[str, ...] = ()
    """Rules that fire, or the last ones that fired while only they keep the average of the error above 0."""
    silent: int = 0
    """Number of newest steps in a row that moved nothing because they lack a value; at most `SILENT_STEPS`."""

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> LoopState:
        response = value["response"]
        return cls(
            **{
                **value,
                "baseline": tuple(value["baseline"]),
                "response": response and Response.from_json(response),
                "lowered": tuple(value["lowered"]),
            }
        )

    @property
    def left(self) -> float | None:
        """The fraction of the planned steps that is left; None without a plan, or beyond its end."""
        if self.last_step is None or self.step > self.last_step:
            return None
        return min((self.last_step - self.step) / self.last_step, 1.0)

    def set_point(self, settings: LoopSettings) -> float:
        """Return the set point of the driven part, in nats per token."""
        left = self.left
        if left is None:
            return self._above_static(settings.set_point, settings)
        falling = settings.first_set_point * min(left / settings.cooldown, 1.0) ** COOLDOWN_POWER
        if self.step > FIRST_STEPS:
            falling = min(falling, settings.set_point)
        # A rate that has not been lowered by then is not lowered for the end.
        least = settings.last_set_point if self.log_scale < 0.0 else settings.set_point
        return self._above_static(max(falling, least), settings)

    def only_cools(self, settings: LoopSettings) -> bool:
        """Return whether the set point is low only for the planned end, and nothing is beyond its usual one."""
        usual = self._above_static(settings.set_point, settings)
        within = (self.average or 0.0) <= usual and (self.update or 0.0) <= self.update_point(settings)
        return within and self.set_point(settings) < usual

    def _above_static(self, point: float, settings: LoopSettings) -> float:
        return max(point, settings.static_multiple * (self.static or 0.0))

    def update_point(self, settings: LoopSettings) -> float:
        """Return the set point of the newest update, in nats per token."""
        return settings.update_set_point * (FIRST_UPDATES_MULTIPLE if 0 < self.updates <= FIRST_UPDATES else 1.0)

    def fall(self, settings: LoopSettings) -> float:
        """Return by how much log s falls in the next step if nothing changes; 0 if it would rise."""
        return settings.gain * max(self.error, 0.0)


def advance_loop(state: LoopState, reading: Reading, settings: LoopSettings) -> LoopState:
    """Return the state after a closed step. A step without a reading changes nothing, so that it raises nothing."""
    if not settings.enabled:
        return state
    reading = _checked(reading)
    if reading.last_step is not None and reading.last_step > 0.0:
        state = replace(state, last_step=reading.last_step)
    state = _with_driven(replace(state, step=reading.step), reading, settings)
    state = _with_full_update(state, reading)
    errors = [ERROR_OF_A_RULE] if reading.lowered else []
    if state.driven is not None:
        errors.append(math.log(max(state.driven, SMALLEST) / state.set_point(settings)))
    if state.update is not None:
        errors.append(math.log(max(state.update, SMALLEST) / state.update_point(settings)))
    # The driven part or the update is missing, while earlier steps had it: the other one is not enough.
    lacks_a_value = (state.driven is None and state.average is not None) or (state.update is None and state.updates > 0)
    if not errors or (max(errors) <= 0.0 and lacks_a_value):
        return replace(state, silent=min(state.silent + 1, SILENT_STEPS))
    error = min(max(*errors, -LARGEST_ERROR), LARGEST_ERROR)
    is_within = error <= 0.0
    # Bounded below: there the scale already rises as fast as it may, and a lower average would delay the next fall.
    error = max(state.error + settings.weight * (error - state.error), -LARGEST_RISE / settings.gain)
    change = min(-settings.gain * error, LARGEST_RISE if settings.raises else 0.0)
    moved = min(max(state.log_scale + change, math.log(settings.floor)), 0.0)
    lowered = reading.lowered or (state.lowered if is_within and error > 0.0 else ())
    state = replace(state, error=error, log_scale=moved, lowered=lowered, silent=0)
    return _judge_response(state, reading, settings)


def _checked(reading: Reading) -> Reading:
    """Return the reading without values that are not measurements.

    These are a k3 of few tokens or below 0, a k3 of lagging tokens that is exactly 0, an update that is not above 0.
    """
    k3, at_lag_0 = (
        None if each is not None and each < -SMALLEST else each for each in (reading.k3, reading.k3_at_lag_0)
    )
    if k3 is not None and reading.tokens is not None and reading.tokens < FEWEST_TOKENS:
        k3 = None
    if k3 is not None and k3 <= 0.0 and reading.lag != 0.0:
        # μ was logged in place of π, as in bypass mode.
        k3 = None
    moved = reading.update is not None and reading.update > 0.0
    return replace(reading, k3=k3, k3_at_lag_0=at_lag_0, update=reading.update if moved else None)


def _with_driven(state: LoopState, reading: Reading, settings: LoopSettings) -> LoopState:
    at_lag_0 = reading.k3 if reading.lag == 0.0 else reading.k3_at_lag_0
    if at_lag_0 is not None:
        static = at_lag_0
        old = state.static
        if old is not None and state.measured_static:
            most = LARGEST_FACTOR * max(old, settings.set_point)
            static = old + WEIGHT_OF_PARTS * (min(at_lag_0, most) - old)
        state = replace(state, static=static, measured_static=True)
    state = _with_baseline(state, reading.k3 if at_lag_0 is None else at_lag_0)
    driven = None
    if reading.k3 is not None and (reading.lag == 0.0 or state.static is not None):
        driven = 0.0 if reading.lag == 0.0 else max(reading.k3 - (state.static or 0.0), 0.0)
    average = state.average
    if driven is not None:
        average = driven if average is None else average + WEIGHT_OF_PARTS * (driven - average)
    return replace(state, driven=driven, update=reading.update, average=average)


def _with_baseline(state: LoopState, k3: float | None) -> LoopState:
    """Collect readings while there is no static part, or while they are too small to contain it."""
    if k3 is None:
        return state
    if state.static is not None and k3 >= state.static / LARGEST_FACTOR:
        return replace(state, baseline=()) if state.baseline else state
    baseline = (*state.baseline, k3)
    if len(baseline) < BASELINE_READINGS:
        return replace(state, baseline=baseline)
    return replace(state, baseline=(), static=statistics.median(baseline))


def _with_full_update(state: LoopState, reading: Reading) -> LoopState:
    """Average the update as it would be at the highest rate so far, over steps with at least half of that rate."""
    if reading.update is None:
        return state
    state = replace(state, updates=state.updates + 1)
    if not reading.rate:
        return state
    highest = max(state.highest_rate or 0.0, reading.rate)
    left, old = reading.rate / highest, state.full_update
    state = replace(state, highest_rate=highest)
    if state.updates <= FIRST_UPDATES or (old is not None and left < LEAST_LEFT):
        return state
    full = max(reading.update, SMALLEST) / left**UPDATE_EXPONENT
    return replace(state, full_update=full if old is None else old * (full / old) ** WEIGHT_OF_FULL_UPDATE)


def _judge_response(state: LoopState, reading: Reading, settings: LoopSettings) -> LoopState:
    """Count the driven part as static if the rate fell to the floor and it did not halve."""
    if state.measured_static or state.average is None or state.driven is None:
        return state
    if state.log_scale >= 0.0:
        return replace(state, response=None)
    response = state.response or Response(state.average, reading.rate)
    if state.log_scale <= math.log(settings.floor):
        response = replace(response, at_floor=(*response.at_floor, state.driven)[-PATIENCE:])
    # In shadow mode the rate does not fall, and nothing can respond.
    fell = response.rate is not None and reading.rate is not None and reading.rate <= response.rate / 2
    if len(response.at_floor) < PATIENCE or not fell:
        return replace(state, response=response)
    usual = statistics.median(response.at_floor)
    if usual <= response.driven / 2:
        return replace(state, response=replace(response, at_floor=()))
    static = (state.static or 0.0) + usual
    return replace(state, static=static, driven=0.0, average=0.0, error=0.0, response=None, follows=False)


def finding(state: LoopState, settings: LoopSettings) -> str | None:
    """Return what the loop knows of a mismatch that the learning rate does not drive; None if there is none."""
    static = state.static
    if static is None or static <= settings.set_point or not (state.measured_static or not state.follows):
        return None
    how = "at lag 0" if state.measured_static else "and did not fall with the learning rate"
    return (
        f"{static:.2g} nats per token of the mismatch are static: k3 is so high {how}. A lower learning rate would not "
        "help against it; find its cause by a probe, or correct the loss."
    )
