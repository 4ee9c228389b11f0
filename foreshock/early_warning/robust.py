"""Robust statistics: median, and a noise estimate that single outliers and trends hardly change."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

MAD_TO_SIGMA = 1.4826
"""Standard deviation / median absolute deviation of a normal distribution."""


def median(values: Sequence[float]) -> float:
    """Return the median; the mean of the two middle values for an even count. Raises ValueError if empty."""
    if not values:
        raise ValueError("median() needs at least one value, got none")
    ordered = sorted(values)
    middle = len(ordered) // 2
    if len(ordered) % 2:
        return ordered[middle]
    return 0.5 * (ordered[middle - 1] + ordered[middle])


def step_noise(values: Sequence[float]) -> float:
    """Return the standard deviation of step-to-step noise, from absolute successive differences (robust to a trend).

    An upper estimate: with few differences the median may be small by chance, so it is widened by 1 + 1.5 / √n (about
    two standard errors of a median of absolute values). 0 with fewer than three values.
    """
    if len(values) < 3:
        return 0.0
    differences = [abs(later - earlier) for earlier, later in pairwise(values)]
    widening = 1.0 + 1.5 / math.sqrt(len(differences))
    return MAD_TO_SIGMA * widening * median(differences) / math.sqrt(2.0)
