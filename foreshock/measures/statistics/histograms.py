"""Histograms on fixed grids, whose bins are read from the bits of a float64, and the lengths of responses.

Each power of two is divided into equal steps: 64 for |d| (a bin is 0.8–1.6 % wide), 128 for lengths (integers below 256
have a bin of their own). Bins from bits, not from a logarithm, are the same on every machine. A length is the number of
model-generated tokens, before any filtering by reward.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_MANTISSA_BITS = 52
_EXPONENT_BIAS = 1023


@dataclass(frozen=True, slots=True)
class BitGrid:
    """Bins over [2^lowest, 2^highest), with one bin below (0 included) and one above."""

    lowest: int
    highest: int
    bits: int  # 2^bits bins per power of two

    @property
    def size(self) -> int:
        """The number of bins, including the one below and the one above."""
        return ((self.highest - self.lowest) << self.bits) + 2

    def bins(self, values: NDArray[np.float64]) -> NDArray[np.int64]:
        """Return the bin of each value; values must not be negative or NaN."""
        shift = _MANTISSA_BITS - self.bits
        raw = np.ascontiguousarray(values, dtype=np.float64).view(np.int64) >> shift
        first = (_EXPONENT_BIAS + self.lowest) << self.bits
        return np.clip(raw - (first - 1), 0, self.size - 1)

    def lower_edge(self, index: int) -> float:
        """Return the smallest value of the bin; 0 for the one below."""
        if index <= 0:
            return 0.0
        octave, step = divmod(index - 1, 1 << self.bits)
        return math.ldexp(1.0 + step / (1 << self.bits), self.lowest + octave)

    def upper_edge(self, index: int) -> float:
        """Return the lower edge of the next bin; infinity for the one above."""
        return math.inf if index >= self.size - 1 else self.lower_edge(index + 1)

    def edges(self) -> NDArray[np.float64]:
        """Return all edges, [size + 1], from 0 to infinity."""
        return np.array([self.lower_edge(index) for index in range(self.size)] + [math.inf])

    def quantile_bins(self, counts: NDArray[np.int64], fractions: Sequence[float]) -> list[int]:
        """Return the bin of the smallest value with at least each fraction of all at or below it; −1 if empty."""
        running = np.cumsum(counts)
        total = int(running[-1])
        if total == 0:
            return [-1] * len(fractions)
        ranks = [min(max(math.ceil(fraction * total), 1), total) for fraction in fractions]
        return [int(running.searchsorted(rank)) for rank in ranks]

    def quantiles(self, counts: NDArray[np.int64], fractions: Sequence[float]) -> list[float]:
        """Return the quantile of each fraction, as the geometric middle of its bin; NaN if there are no values."""
        return [self._middle(index) for index in self.quantile_bins(counts, fractions)]

    def _middle(self, index: int) -> float:
        if index < 0:
            return math.nan
        lower, upper = self.lower_edge(index), self.upper_edge(index)
        if lower == 0.0 or math.isinf(upper):
            return lower
        return math.sqrt(lower * upper)


# |d| from 2^-27 (7e-9, half a unit in the last place of a float32 log-prob near −0.1) to 2^7 = 128.
LOG_RATIO_GRID = BitGrid(lowest=-27, highest=7, bits=6)
# |d| from 2^-12 (a ratio of 1.00024), 16 bins per power of two, for the sums of importance weights.
WEIGHT_GRID = BitGrid(lowest=-12, highest=7, bits=4)
# Lengths up to 2^21 tokens; 0 is in the bin below.
LENGTH_GRID = BitGrid(lowest=0, highest=21, bits=7)


@dataclass(frozen=True, slots=True, eq=False)
class LengthStatistics:
    """`moments` [4] are the count, Σ L, the negated minimum and the maximum; `histogram` is on LENGTH_GRID."""

    moments: NDArray[np.int64]
    histogram: NDArray[np.int64]

    @classmethod
    def of(cls, lengths: NDArray[np.int64]) -> LengthStatistics:
        """Return the statistics of N lengths."""
        histogram = np.bincount(LENGTH_GRID.bins(lengths.astype(np.float64)), minlength=LENGTH_GRID.size)
        least = int(lengths.min()) if lengths.size else np.iinfo(np.int64).max
        most = int(lengths.max()) if lengths.size else 0
        moments = [lengths.size, int(lengths.sum()), -least, most]
        return cls(np.array(moments, dtype=np.int64), histogram.astype(np.int64, copy=False))

    def merge(self, other: LengthStatistics) -> LengthStatistics:
        """Return the statistics of both sets of lengths."""
        moments = self.moments + other.moments
        moments[2:] = np.maximum(self.moments[2:], other.moments[2:])
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

    def maximum(self) -> float:
        """Return the longest length; NaN if there is none."""
        return float(self.moments[3]) if self.count else math.nan

    def quantiles(self, fractions: Sequence[float]) -> list[float]:
        """Return the smallest length with at least each fraction of all at or below it.

        Exact below 256, else within 0.4 %.
        """
        return [self._middle(index) for index in LENGTH_GRID.quantile_bins(self.histogram, fractions)]

    def _middle(self, index: int) -> float:
        if index < 0:
            return math.nan
        lower, upper = LENGTH_GRID.lower_edge(index), LENGTH_GRID.upper_edge(index)
        # The integers of the bin: its lower edge included, its upper edge excluded.
        first, last = math.ceil(lower), math.ceil(upper) - 1 if math.isfinite(upper) else math.ceil(lower)
        middle = first if last <= first else (first + last) // 2
        return float(min(max(middle, -int(self.moments[2])), int(self.moments[3])))
