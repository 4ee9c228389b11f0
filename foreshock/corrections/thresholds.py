"""Thresholds of corrections: their text form, their validation, and their place in d = log ρ.

The text form is that of verl: `2`, or `0.5_5` for a lower and an upper bound. Tokens and sequences are compared with a
threshold by the logarithm, never by ρ.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from foreshock.errors import InvalidArgumentError

__all__ = ["Bounds", "Threshold", "parse_threshold"]


class Bounds(StrEnum):
    """The kinds of bounds that a correction takes."""

    NONE = "none"  # no threshold
    CAP = "cap"  # an upper bound of a ratio, at least 1
    UPPER = "upper"  # an upper bound of a ratio, and optionally a lower one
    RANGE = "range"  # both bounds of a ratio; C alone is short for 1/C to C
    DIVERGENCE = "divergence"  # an upper bound of a divergence, in nats
    FLOOR = "floor"  # a lower bound of a ratio, at most 1


@dataclass(frozen=True, slots=True)
class Threshold:
    """A lower and an upper bound of a ratio, or an upper bound of a divergence in nats. None means no bound."""

    lower: float | None = None
    upper: float | None = None

    @property
    def log_lower(self) -> float:
        """The lower bound of d; −inf if there is none."""
        if self.lower is None:
            return -math.inf
        # Negating the upper bound makes 1/C to C symmetric to the last bit.
        if self.upper is not None and self.lower == 1.0 / self.upper:
            return -math.log(self.upper)
        return math.log(self.lower)

    @property
    def log_upper(self) -> float:
        """The upper bound of d; inf if there is none."""
        return math.inf if self.upper is None else math.log(self.upper)

    def __str__(self) -> str:
        # Ten digits distinguish a threshold from an exact level beside it, and are read back as the same number.
        bounds = [f"{bound:.10g}" for bound in (self.lower, self.upper) if bound is not None]
        return "_".join(bounds) or "none"


def parse_threshold(text: str, bounds: Bounds) -> Threshold:
    """Return the threshold that `text` names: `2`, or `0.5_5`. Raises InvalidArgumentError with a valid example."""
    parts = text.split("_")
    try:
        numbers = [float(part) for part in parts]
    except ValueError:
        numbers = []
    if not 1 <= len(numbers) <= 2:
        raise InvalidArgumentError(f"got {text!r}, expected a number, or lower_upper such as 0.5_5", "threshold")
    if len(numbers) == 2:
        return checked(Threshold(numbers[0], numbers[1]), bounds)
    if bounds is Bounds.FLOOR:
        return checked(Threshold(lower=numbers[0]), bounds)
    return checked(Threshold(upper=numbers[0]), bounds)


def checked(threshold: Threshold, bounds: Bounds) -> Threshold:
    """Return the threshold, with 1/C as the lower bound of a RANGE given as C. Raises InvalidArgumentError."""
    lower, upper = threshold.lower, threshold.upper
    for bound in (lower, upper):
        if bound is not None and not (math.isfinite(bound) and bound > 0.0):
            raise InvalidArgumentError(f"a bound must be a finite number above 0, got {bound}", "threshold")
    if bounds is Bounds.NONE and (lower is not None or upper is not None):
        raise InvalidArgumentError("this correction has no threshold: leave it out", "threshold")
    if bounds is Bounds.RANGE and lower is None and upper is not None and upper >= 1.0:
        lower = 1.0 / upper
    expected = _expected(lower, upper, bounds)
    if expected:
        raise InvalidArgumentError(f"expected {expected}, got {Threshold(lower, upper)}", "threshold")
    return Threshold(lower, upper)


def _expected(lower: float | None, upper: float | None, bounds: Bounds) -> str:
    """Return a description of the bounds that fit; an empty string if these do."""
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
