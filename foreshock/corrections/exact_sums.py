"""Sums that are the same in whatever order their terms come, and say infinity where they leave float64."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

__all__ = ["exact_sum"]


def exact_sum(values: Iterable[float]) -> float:
    """Σ, correctly rounded; infinite where it overflows, NaN where infinities of both signs meet."""
    terms = list(values)
    try:
        return math.fsum(terms)
    except (OverflowError, ValueError):
        with np.errstate(over="ignore", invalid="ignore"):
            return float(np.sum(terms))
