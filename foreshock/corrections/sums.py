"""Sums and means that overflow to infinity instead of raising."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

__all__ = ["exact_sum", "mean"]


def exact_sum(values: Iterable[float]) -> float:
    """Return the correctly rounded sum, the same in any order; infinite on overflow, NaN for +inf and −inf together."""
    terms = list(values)
    try:
        return math.fsum(terms)
    except (OverflowError, ValueError):
        with np.errstate(over="ignore", invalid="ignore"):
            return float(np.sum(terms))


def mean(values: NDArray[np.float64]) -> float:
    """Return the mean by pairwise summation; NaN of no values, infinite on overflow."""
    if not values.size:
        return float("nan")
    with np.errstate(over="ignore", invalid="ignore"):
        return float(values.sum()) / values.size
