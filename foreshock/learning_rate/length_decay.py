"""The length-decay schedule: halve the learning rate every 1.8 × the step of the length surge.

The rule (LR-scheduling paper): ``T_decay = 1.8 × surge step``; at every step t with ``t mod T_decay = 0``,
``η ← max(η / 2, 0.1 η₀)``. A surge at step 110 gives T_decay 198: halvings at 198, 396 and 594, the floor at 792.

What was decided is a list of points, each of which says what is in force from a step on: the halvings so far, the steps
of further ones, and the control loop's scale. The scale is an absolute function of the step, so repeated or late
evaluation changes nothing.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
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
class Schedule:
    """The schedule of a surge: the scale is multiplied by `factor` every `decay_period` steps, down to `floor`."""

    surge_step: int
    decay_period: int
    factor: float = DECAY_FACTOR
    floor: float = DECAY_FLOOR

    def __post_init__(self) -> None:
        if self.decay_period < 1:
            raise ValueError(f"decay_period must be at least 1 step, got {self.decay_period}")
        _check_factor_and_floor(self.factor, self.floor)

    @classmethod
    def from_surge(cls, surge_step: int, settings: ScheduleSettings | None = None) -> Schedule:
        """Return the schedule of a surge at ``surge_step``."""
        chosen = settings or ScheduleSettings()
        return cls(surge_step, chosen.period(surge_step), chosen.factor, chosen.floor)

    def boundary(self, step: int) -> int:
        """Return the first boundary at ``step`` or later; step 0 is never one."""
        return max(-(-step // self.decay_period), 1) * self.decay_period


WARMUP = 3
"""First steps of a run that starts in apply mode, over which the feed raises the scale evenly. At a rate that is six
times too high the first update alone can destroy a policy, before anything is measured."""


def warmed(scale: float, step: int, floor: float) -> float:
    """Return the part of a scale that the warm-up leaves at ``step``, not below the floor; later steps have all."""
    return scale if step >= WARMUP else max(scale * max(step, 1) / WARMUP, floor)


HORIZON = 10
"""Steps for which a client without an answer continues the loop's last fall; then the scale stays."""

POINTS_SENT = 16
"""Points in an answer: those that a trainer may still ask for, and the ones before them."""


@dataclass(frozen=True, slots=True)
class Point:
    """The schedule that is in force from ``step`` on.

    There are ``halvings``, and one more at ``boundary`` and every ``period`` steps after it (None: no more). The
    control loop's scale is ``loop`` at ``loop_step``, and its log falls by ``fall`` a step, for `HORIZON` steps. Until
    the loop has moved it is 1, with ``loop_step`` None.
    """

    step: int = 0
    halvings: int = 0
    boundary: int | None = None
    period: int = 1
    loop: float = 1.0
    loop_step: int | None = None
    fall: float = 0.0

    def __post_init__(self) -> None:
        if self.halvings < 0 or self.period < 1:
            raise ValueError(f"halvings must be at least 0, period at least 1, got {self.halvings} and {self.period}")
        if not (0.0 < self.loop <= 1.0 and 0.0 <= self.fall <= 1.0):
            raise ValueError(f"loop must be above 0 and at most 1, fall from 0 to 1, got {self.loop} and {self.fall}")

    def count(self, step: int) -> int:
        """Return the number of halvings up to ``step``."""
        if self.boundary is None or step < self.boundary:
            return self.halvings
        return self.halvings + 1 + (step - self.boundary) // self.period

    def from_step(self, step: int) -> Point:
        """Return the point from ``step`` on: its boundaries before that are halvings, the others are ahead."""
        halvings, boundary = self.count(step - 1), self.boundary
        if boundary is not None:
            boundary += (halvings - self.halvings) * self.period
        return replace(self, step=step, halvings=halvings, boundary=boundary)

    def loop_at(self, step: int) -> float:
        """Return the loop's scale at ``step``."""
        return self.loop * math.exp(-self.fall * min(max(step - (self.loop_step or 0), 0), HORIZON))

    def is_falling(self, step: int) -> bool:
        """Return whether the loop's scale at ``step`` is above that of the next one."""
        return self.fall > 0.0 and step - (self.loop_step or 0) < HORIZON

    def scale(self, step: int, factor: float, floor: float) -> float:
        """Return η(step) / η₀: the lower of the halvings' and the loop's, not below the floor."""
        return max(floor, min(factor ** self.count(step), self.loop_at(step)))

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Point:
        """Parse a point; unknown keys are ignored, because a newer service may send more."""
        found = cls(**{name: value[name] for name in cls.__slots__ if name in value})
        if not all(isinstance(each, int | None) for each in (found.step, found.boundary, found.loop_step)):
            raise ValueError(f"steps of a point must be whole numbers, got {value}")
        return found


_STEP_OF = attrgetter("step")


def point_at(points: Sequence[Point], step: int) -> Point:
    """Return the point in force at ``step``, of points in ascending order; before the first, nothing is."""
    after = bisect_right(points, step, key=_STEP_OF)
    return points[after - 1] if after else Point()


def halvings_of(points: Sequence[Point]) -> tuple[int, ...]:
    """Return the steps of the halvings before the newest point and at it, ascending."""
    steps: list[int] = []
    for before, point in pairwise((Point(), *points)):
        first = before.boundary
        steps += [] if first is None else range(first, point.step, before.period)
        # A halving that was taken back is not listed, and an operator's is at its point.
        steps = [*steps[: point.halvings], *[point.step] * (point.halvings - len(steps))]
    return tuple(steps)


def newest_points(points: Sequence[Point]) -> tuple[Point, ...]:
    """Return the points for an answer to a trainer; if some are left out, the first one stands for them too.

    Earlier steps then have no scale of their own: what was advised in the past is in the log of decisions.
    """
    if len(points) <= POINTS_SENT:
        return tuple(points)
    return (replace(points[-POINTS_SENT], step=0), *points[1 - POINTS_SENT :])


def lowering(factor: float) -> str:
    """Return what a boundary does to the learning rate, as a verb in the third person."""
    return "halves" if factor == DECAY_FACTOR else f"is multiplied by {factor:g}"


def next_fall(points: Sequence[Point], step: int, factor: float, floor: float) -> int | None:
    """Return the next step after ``step`` at which the scale falls below its value there; None if it does not."""
    now = point_at(points, step).scale(step, factor, floor)
    ahead = [each for each in points if each.step > step]
    candidates = {each.step for each in ahead}
    for point in (point_at(points, step), *ahead):
        start = max(point.step, step + 1)
        candidates.update(range(start, (point.loop_step or 0) + HORIZON + 1))
        if point.boundary is not None and now > floor:
            # Not one by one: with a factor near 1 and a floor of 0 there are hundreds of thousands before the floor.
            needed = math.ceil(math.log(now) / math.log(factor)) - point.halvings - 1
            least = max(needed, (start - point.boundary) // point.period, 0)
            candidates.update(point.boundary + (least + more) * point.period for more in range(3))
    falls = (each for each in candidates if each > step and point_at(points, each).scale(each, factor, floor) < now)
    return min(falls, default=None)
