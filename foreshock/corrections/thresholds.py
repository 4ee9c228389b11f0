"""The thresholds of a correction: what a caller may name, and where each lies in d = log ρ.

They are written as verl writes them: `2`, or `0.5_5` for a lower and an upper bound. Decisions are taken on the
logarithm, never on ρ.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from foreshock.errors import InvalidArgumentError

__all__ = ["Bounds", "Threshold", "parse_threshold"]


class Bounds(StrEnum):
    """Which bounds a correction takes."""

    NONE = "none"  # it has no threshold
    CAP = "cap"  # an upper bound of a ratio, at least 1
    UPPER = "upper"  # an upper bound of a ratio, and a lower one where it is named
    RANGE = "range"  # both bounds of a ratio; C alone is short for 1/C to C
    DIVERGENCE = "divergence"  # an upper bound of a divergence, in nats
    FLOOR = "floor"  # a lower bound of a ratio, at most 1


@dataclass(frozen=True, slots=True)
class Threshold:
    """A lower and an upper bound: of a ratio, or (`upper` alone) of a divergence in nats. None is no bound."""

    lower: float | None = None
    upper: float | None = None

    @property
    def log_lower(self) -> float:
        """The lower bound of d; −inf where there is none."""
        if self.lower is None:
            return -math.inf
        # The same number as the upper bound's, so that 1/C to C is symmetric to the last digit.
        if self.upper is not None and self.lower == 1.0 / self.upper:
            return -math.log(self.upper)
        return math.log(self.lower)

    @property
    def log_upper(self) -> float:
        """The upper bound of d; inf where there is none."""
        return math.inf if self.upper is None else math.log(self.upper)

    def __str__(self) -> str:
        # As many digits as tell a threshold from the exact levels, so that what is written is read as the same.
        bounds = [f"{bound:.10g}" for bound in (self.lower, self.upper) if bound is not None]
        return "_".join(bounds) or "none"


def parse_threshold(text: str, bounds: Bounds) -> Threshold:
    """The threshold that `text` names: `2`, or `0.5_5`; raises InvalidArgumentError saying what would be right."""
    parts = text.split("_")
    try:
        numbers = [float(part) for part in parts]
    except ValueError:
        numbers = []
    if not 1 <= len(numbers) <= 2:
        raise InvalidArgumentError(
            f"{text!r} is no threshold: write a number, or lower_upper such as 0.5_5", "threshold"
        )
    if len(numbers) == 2:
        return checked(Threshold(numbers[0], numbers[1]), bounds)
    if bounds is Bounds.FLOOR:
        return checked(Threshold(lower=numbers[0]), bounds)
    return checked(Threshold(upper=numbers[0]), bounds)


def checked(threshold: Threshold, bounds: Bounds) -> Threshold:
    """The threshold with both bounds where a RANGE named one; raises InvalidArgumentError where it makes no sense."""
    lower, upper = threshold.lower, threshold.upper
    for bound in (lower, upper):
        if bound is not None and not (math.isfinite(bound) and bound > 0.0):
            raise InvalidArgumentError(f"a bound must be a finite number above 0, not {bound}", "threshold")
    if bounds is Bounds.NONE and (lower is not None or upper is not None):
        raise InvalidArgumentError("there is none to this correction: leave it out", "threshold")
    if bounds is Bounds.RANGE and lower is None and upper is not None and upper >= 1.0:
        lower = 1.0 / upper
    wanted = _wanted(lower, upper, bounds)
    if wanted:
        raise InvalidArgumentError(f"name {wanted}, not {Threshold(lower, upper)}", "threshold")
    return Threshold(lower, upper)


def _wanted(lower: float | None, upper: float | None, bounds: Bounds) -> str:
    """What these bounds should have been; empty where they fit."""
    if bounds is Bounds.FLOOR:
        fits = lower is not None and upper is None and lower <= 1.0
        return "" if fits else "one ratio of at most 1, such as 1e-4"
    if bounds is Bounds.DIVERGENCE:
        fits = lower is None and upper is not None
        return "" if fits else "one upper bound in nats, such as 0.01"
    if bounds is Bounds.CAP:
        fits = lower is None and upper is not None and upper >= 1.0
        return "" if fits else "one ratio of at least 1, such as 2"
    if bounds is Bounds.UPPER or bounds is Bounds.RANGE:
        fits = upper is not None and upper >= 1.0 and (lower is None or lower <= 1.0)
        return "" if fits else "an upper bound of at least 1 and a lower one of at most 1, such as 2 or 0.5_5"
    return ""
