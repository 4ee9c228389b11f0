"""Lengths of responses: an exact sum, the extremes, and a histogram for quantiles.

A length is the number of model-generated tokens, before any filtering by reward.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from foreshock.measures.statistics.histograms import LENGTH_GRID

__all__ = ["LengthStatistics"]


@dataclass(frozen=True, slots=True, eq=False)
class LengthStatistics:
    """`moments` [5] are the count, Σ L, Σ L², the negated minimum and the maximum; `histogram` is on LENGTH_GRID."""

    moments: NDArray[np.int64]
    histogram: NDArray[np.int64]

    @classmethod
    def of(cls, lengths: NDArray[np.int64]) -> LengthStatistics:
        """Return the statistics of N lengths."""
        histogram = np.bincount(LENGTH_GRID.bins(lengths.astype(np.float64)), minlength=LENGTH_GRID.size)
        least = int(lengths.min()) if lengths.size else np.iinfo(np.int64).max
        most = int(lengths.max()) if lengths.size else 0
        moments = [lengths.size, int(lengths.sum()), int(np.square(lengths).sum()), -least, most]
        return cls(np.array(moments, dtype=np.int64), histogram.astype(np.int64, copy=False))

    def merge(self, other: LengthStatistics) -> LengthStatistics:
        """Return the statistics of both sets of lengths."""
        moments = self.moments + other.moments
        moments[3:] = np.maximum(self.moments[3:], other.moments[3:])
        return LengthStatistics(moments, self.histogram + other.histogram)

    @property
    def count(self) -> int:
        """The number of lengths."""
        return int(self.moments[0])

    @property
    def total(self) -> int:
        """Σ L, in tokens."""
        return int(self.moments[1])

    def mean(self) -> float:
        """Return the mean length; NaN if there is none."""
        return self.total / self.count if self.count else math.nan

    def standard_deviation(self) -> float:
        """Return the standard deviation with n − 1; NaN below two lengths."""
        if self.count < 2:
            return math.nan
        # Python integers have any size: no cancellation.
        square = self.count * int(self.moments[2]) - self.total * self.total
        return math.sqrt(square / (self.count * (self.count - 1)))

    def minimum(self) -> float:
        """Return the shortest length; NaN if there is none."""
        return float(-self.moments[3]) if self.count else math.nan

    def maximum(self) -> float:
        """Return the longest length; NaN if there is none."""
        return float(self.moments[4]) if self.count else math.nan

    def quantile(self, fraction: float) -> float:
        """Return the smallest length with at least `fraction` of all at or below it; exact below 256, else within 0.4
        %.
        """
        return self.quantiles((fraction,))[0]

    def quantiles(self, fractions: Sequence[float]) -> list[float]:
        """Return `quantile` of each fraction."""
        return [self._middle(index) for index in LENGTH_GRID.quantile_bins(self.histogram, fractions)]

    def _middle(self, index: int) -> float:
        if index < 0:
            return math.nan
        lower, upper = LENGTH_GRID.lower_edge(index), LENGTH_GRID.upper_edge(index)
        # The integers of the bin: its lower edge included, its upper edge excluded.
        first, last = math.ceil(lower), math.ceil(upper) - 1 if math.isfinite(upper) else math.ceil(lower)
        middle = first if last <= first else (first + last) // 2
        return float(min(max(middle, -int(self.moments[3])), int(self.moments[4])))
