"""The k largest values of a set, exact in any order of merging: what the fit of a tail is made from."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["largest_of"]

Float64 = NDArray[np.float64]


def largest_of(known: Float64, values: Float64, count: int) -> Float64:
    """The `count` largest (or all, if fewer) of `known`, falling, and `values`, in any order; falling."""
    if known.size >= count:
        values = values[values > known[-1]]
        if values.size == 0:
            return known
    elif values.size > count:
        values = np.partition(values, values.size - count)[-count:]
    return np.sort(np.concatenate([known, values]))[::-1][:count].copy()
