"""The length-decay schedule: halve the learning rate every 1.8 × the step of the length surge.

The rule (LR-scheduling paper): ``T_decay = 1.8 × surge step``; at every step t with ``t mod T_decay = 0``,
``η ← max(η / 2, 0.1 η₀)``. A surge at step 110 gives T_decay 198: halvings at 198, 396 and 594, the floor at 792.
The schedule is a factor on η₀ and an absolute function of the step, so repeated or late evaluation changes nothing.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from operator import attrgetter
from typing import Any

DECAY_MULTIPLIER = 1.8
"""T_decay / surge step (LR-scheduling paper). Worked: 100 and 160 for a surge at 90, 125 and 204 for one at 110."""

DECAY_FACTOR = 0.5
DECAY_FLOOR = 0.1

MINIMUM_DECAY_PERIOD = 45
"""Steps. Without a minimum, a surge at step 10 takes a healthy run to the floor within 72 steps; with it no run gets
there before step 180. Periods of 2.27 × the surge step failed on both published runs (250 for 110, 204 for 90); 45 is
below that for every surge after step 20, and only earlier surges need the minimum."""


@dataclass(frozen=True, slots=True)
class ScheduleSettings:
    """The constants of the schedule: period / surge step, factor and floor of the scale, shortest period in steps."""

    multiplier: float = DECAY_MULTIPLIER
    factor: float = DECAY_FACTOR
    floor: float = DECAY_FLOOR
    minimum_period: int = MINIMUM_DECAY_PERIOD

    def __post_init__(self) -> None:
        if not (math.isfinite(self.multiplier) and self.multiplier > 0.0):
            raise ValueError(f"multiplier must be above 0, got {self.multiplier}")
        _check_factor_and_floor(self.factor, self.floor)

    def period(self, surge_step: int) -> int:
        """Return the period of a surge at ``surge_step``, rounded down: early is safer than late."""
        # Float products can fall just below an integer; the epsilon keeps it.
        return max(math.floor(self.multiplier * surge_step + 1e-9), self.minimum_period, 1)


def _check_factor_and_floor(factor: float, floor: float) -> None:
    if not 0.0 < factor < 1.0:
        raise ValueError(f"factor must satisfy 0 < factor < 1, got {factor}")
    if not 0.0 <= floor <= 1.0:
        raise ValueError(f"floor must satisfy 0 <= floor <= 1, got {floor}")


@dataclass(frozen=True, slots=True)
class LengthDecaySchedule:
    """Halvings at the multiples of ``decay_period`` from ``effective_from_step`` on.

    Boundaries before ``effective_from_step`` (past when the surge became known) and from ``paused_from_step`` on (an
    operator's hold) do not count.
    """

    surge_step: int
    decay_period: int
    factor: float = DECAY_FACTOR
    floor: float = DECAY_FLOOR
    effective_from_step: int = 0
    paused_from_step: int | None = None

    def __post_init__(self) -> None:
        if self.decay_period < 1:
            raise ValueError(f"decay_period must be at least 1 step, got {self.decay_period}")
        _check_factor_and_floor(self.factor, self.floor)

    @classmethod
    def from_surge(
        cls, surge_step: int, settings: ScheduleSettings | None = None, effective_from_step: int = 0
    ) -> LengthDecaySchedule:
        """Return the schedule of a surge at ``surge_step``."""
        chosen = settings or ScheduleSettings()
        return cls(surge_step, chosen.period(surge_step), chosen.factor, chosen.floor, effective_from_step)

    def halvings_until(self, step: int) -> int:
        """Return the number of boundaries up to ``step`` that count; step 0 is never one."""
        first = max(self.effective_from_step, 1)
        step = self._last_effective(step)
        if step < first:
            return 0
        return step // self.decay_period - (first - 1) // self.decay_period

    def boundaries_until(self, step: int) -> tuple[int, ...]:
        """Return the boundaries up to ``step`` that count, ascending."""
        last = self._last_effective(step) // self.decay_period
        return tuple(k * self.decay_period for k in range(last - self.halvings_until(step) + 1, last + 1))

    def next_boundary(self, step: int) -> int | None:
        """Return the first boundary after ``step``, also if the floor is already reached; None while paused."""
        start = max(step + 1, self.effective_from_step, 1)
        boundary = -(-start // self.decay_period) * self.decay_period
        return boundary if boundary == self._last_effective(boundary) else None

    def effective_from(self, step: int) -> LengthDecaySchedule:
        """Return the schedule, not paused, with its first boundary at ``step`` or later."""
        return replace(self, effective_from_step=max(step, 0), paused_from_step=None)

    def paused_from(self, step: int) -> LengthDecaySchedule:
        """Return the schedule without its boundaries at ``step`` or later."""
        return replace(self, paused_from_step=max(step, 0))

    def _last_effective(self, step: int) -> int:
        return step if self.paused_from_step is None else min(step, self.paused_from_step - 1)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> LengthDecaySchedule:
        """Parse a schedule; unknown keys are ignored, because a newer service may send more."""
        return cls(
            surge_step=int(value["surge_step"]),
            decay_period=int(value["decay_period"]),
            factor=float(value["factor"]),
            floor=float(value["floor"]),
            effective_from_step=int(value.get("effective_from_step", 0)),
            paused_from_step=None if (paused := value.get("paused_from_step")) is None else int(paused),
        )


HORIZON = 10
"""Steps for which a client without an answer continues the loop's last fall; then the scale stays."""

POINTS_SENT = 16
"""Points of the loop in an answer: those that a trainer may still ask for, and the ones before them."""


@dataclass(frozen=True, slots=True)
class LoopPoint:
    """The control loop's scale from ``step`` on; its log falls by ``fall`` a step, for `HORIZON` more steps."""

    step: int
    scale: float
    fall: float = 0.0

    def __post_init__(self) -> None:
        if not (0.0 < self.scale <= 1.0 and 0.0 <= self.fall <= 1.0):
            raise ValueError(f"scale must be above 0 and at most 1, fall from 0 to 1, got {self.scale} and {self.fall}")

    def at(self, step: int) -> float:
        """Return the scale of a step, which is not before ``step``."""
        return self.scale * math.exp(-self.fall * min(step - self.step, HORIZON))

    def is_falling(self, step: int) -> bool:
        """Return whether the scale of a step, which is not before ``step``, is above that of the next one."""
        return self.fall > 0.0 and step - self.step < HORIZON

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> LoopPoint:
        return cls(int(value["step"]), float(value["scale"]), float(value.get("fall", 0.0)))


_STEP_OF = attrgetter("step")


def loop_scale(points: Sequence[LoopPoint], step: int) -> float:
    """Return the loop's scale of a step by its points, in ascending order; 1 before the first."""
    after = bisect_right(points, step, key=_STEP_OF)
    return points[after - 1].at(step) if after else 1.0


def lowest_scale(points: Sequence[LoopPoint]) -> float:
    """Return a lower bound of the loop's scale at any step."""
    return min((point.at(point.step + HORIZON) for point in points), default=1.0)


def points_before(points: Sequence[LoopPoint], step: int) -> tuple[LoopPoint, ...]:
    """Return the points before ``step``, of points in ascending order."""
    return tuple(points[: bisect_left(points, step, key=_STEP_OF)])


def scaled_points(points: Sequence[LoopPoint], first: int, factor: float, floor: float) -> tuple[LoopPoint, ...]:
    """Return the points with one at ``first`` that multiplies the loop and falls no further; () without points."""
    if not points:
        return ()
    scale = max(loop_scale(points, first), floor) * factor
    return (*points_before(points, first), LoopPoint(first, min(max(scale, floor), 1.0)))


def newest_points(points: Sequence[LoopPoint]) -> tuple[LoopPoint, ...]:
    """Return the points for an answer to a trainer; if some are left out, the first one stands for them too.

    Earlier steps then have no scale of their own: what was advised in the past is in the log of decisions.
    """
    if len(points) <= POINTS_SENT:
        return tuple(points)
    return (replace(points[-POINTS_SENT], step=0), *points[1 - POINTS_SENT :])


def lowering(factor: float) -> str:
    """Return what a boundary does to the learning rate, as a verb in the third person."""
    return "halves" if factor == DECAY_FACTOR else f"is multiplied by {factor:g}"


def scale_at(
    schedule: LengthDecaySchedule | None,
    halvings: Sequence[int],
    step: int,
    factor: float = DECAY_FACTOR,
    floor: float = DECAY_FLOOR,
    loop: Sequence[LoopPoint] = (),
) -> float:
    """Return η(step) / η₀: the lower of the loop and of the schedule with the explicit halvings, given by their steps.

    It is never below the floor. ``factor`` and ``floor`` hold if there is no schedule; a schedule has its own.
    """
    if schedule is not None:
        factor, floor = schedule.factor, schedule.floor
    count = sum(1 for halving in halvings if halving <= step)
    if schedule is not None:
        count += schedule.halvings_until(step)
    return max(floor, min(factor**count, loop_scale(loop, step)))


def next_fall(
    schedule: LengthDecaySchedule | None,
    halvings: Sequence[int],
    step: int,
    factor: float = DECAY_FACTOR,
    floor: float = DECAY_FLOOR,
    loop: Sequence[LoopPoint] = (),
) -> int | None:
    """Return the next step after ``step`` at which `scale_at` falls below its value there; None if it does not."""
    now = scale_at(schedule, halvings, step, factor, floor, loop)
    ahead = {halving for halving in halvings if halving > step}
    for point in loop:
        ahead.update(range(max(point.step, step + 1), point.step + HORIZON + 1))
    boundary = None if schedule is None else _boundary_below(schedule, halvings, now, step)
    ahead.update([] if boundary is None else [boundary])
    return min((each for each in ahead if scale_at(schedule, halvings, each, factor, floor, loop) < now), default=None)


def _boundary_below(schedule: LengthDecaySchedule, halvings: Sequence[int], scale: float, step: int) -> int | None:
    """Return the first boundary after ``step`` from which on schedule and halvings are below ``scale``."""
    first = schedule.next_boundary(step)
    if first is None or scale <= schedule.floor:
        return None

    def is_below(number: int) -> bool:
        return scale_at(schedule, halvings, first + number * schedule.decay_period) < scale

    # Not one by one: with a factor near 1 and a floor of 0 there are hundreds of thousands before the floor.
    enough = math.ceil(math.log(scale) / math.log(schedule.factor)) + 1
    number = bisect_left(range(enough), True, key=is_below)
    return first + number * schedule.decay_period if is_below(number) else None
