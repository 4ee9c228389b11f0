"""Sums of importance weights in log space: a product of ratios over a long response can exceed a float64, its logarithm
cannot.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Float64 = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class LogWeights:
    """Σ w and Σ w² of N weights, scaled by exp(−largest) and exp(−2·largest); `largest` of an empty sum is −inf."""

    count: int = 0
    largest: float = -math.inf
    scaled_sum: float = 0.0
    scaled_square_sum: float = 0.0

    @classmethod
    def of(cls, log_weights: Float64) -> LogWeights:
        """Return the sums over an array of finite log weights."""
        if log_weights.size == 0:
            return cls()
        largest = float(log_weights.max())
        with np.errstate(under="ignore"):
            scaled = np.exp(log_weights - largest)
            squares = float(np.square(scaled).sum())
        return cls(int(log_weights.size), largest, float(scaled.sum()), squares)

    def merge(self, other: LogWeights) -> LogWeights:
        """Return the sums over both."""
        if other.count == 0:
            return self
        if self.count == 0:
            return other
        largest = max(self.largest, other.largest)
        mine, theirs = math.exp(self.largest - largest), math.exp(other.largest - largest)
        return LogWeights(
            self.count + other.count,
            largest,
            self.scaled_sum * mine + other.scaled_sum * theirs,
            self.scaled_square_sum * mine * mine + other.scaled_square_sum * theirs * theirs,
        )

    def effective_fraction(self) -> float:
        """Return (Σw)² / (N Σw²), the effective sample size as a fraction of N, from 1/N to 1; NaN if N is 0."""
        if self.count == 0:
            return math.nan
        return self.scaled_sum * self.scaled_sum / (self.count * self.scaled_square_sum)

    def to_array(self) -> Float64:
        """Return the three floats, [3]; the count is stored with the integers."""
        return np.array([self.largest, self.scaled_sum, self.scaled_square_sum])

    @classmethod
    def from_array(cls, count: int, values: Float64) -> LogWeights:
        """Restore the sums from `to_array()`."""
        return cls(count, float(values[0]), float(values[1]), float(values[2]))
