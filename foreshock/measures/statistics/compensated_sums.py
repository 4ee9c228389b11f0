"""Sums that do not lose digits or overflow: compensated float64 sums, and sums of importance weights in log space.

A compensated value is the unrounded sum of a pair (high, low) of float64. A pair carries about 106 bits, so sums of
pairs agree in all bits of a float64, in any order and however they are split into shards (Dekker 1971; Shewchuk 1997).
An infinite term makes the sum infinite, never NaN.

A product of ratios over a long response can exceed the range of a float64; its logarithm cannot.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

Float64 = NDArray[np.float64]
# A value or a sum as a float64 and its rounding error.
Parts = tuple[Float64, Float64]

_SPLITTER = 134_217_729.0  # 2^27 + 1: splits a float64 into two halves whose products are exact


def two_sum(a: Float64, b: Float64) -> tuple[Float64, Float64]:
    """Return a + b rounded, and the exact rounding error (0 if the sum is not finite)."""
    with np.errstate(invalid="ignore", over="ignore"):
        total = a + b
        of_b = total - a
        lost = (a - (total - of_b)) + (b - of_b)
    return total, np.where(np.isfinite(total), lost, 0.0)


def two_product(a: Float64, b: Float64) -> tuple[Float64, Float64]:
    """Return a · b rounded, and the exact rounding error (0 if a factor is too large to be split)."""
    with np.errstate(invalid="ignore", over="ignore"):
        total = a * b
        a_high = _SPLITTER * a - (_SPLITTER * a - a)
        b_high = _SPLITTER * b - (_SPLITTER * b - b)
        a_low, b_low = a - a_high, b - b_high
        lost = a_low * b_low - (((total - a_high * b_high) - a_low * b_high) - a_high * b_low)
    return total, np.where(np.isfinite(lost), lost, 0.0)


def summable_parts(values: Float64) -> Parts:
    """Return [n] values as high + low, exactly, so that any sum of high parts is exact in any order.

    The high parts are multiples of one power of two, and too few for their sum to overflow 53 bits; the low parts are
    about n · 2^-52 of the largest value, so their sums are accurate enough. If a value is not finite, all high parts
    are 0. (ExtractVector in Rump, Ogita and Oishi, "Accurate floating-point summation" (2008).)
    """
    largest = max(float(np.max(values, initial=0.0)), -float(np.min(values, initial=0.0)))
    bits = math.frexp(largest)[1] + (values.size + 2).bit_length() if math.isfinite(largest) else 2000
    if bits > 1023:
        return np.zeros_like(values), values
    grid = math.ldexp(1.0, bits)
    high = (grid + values) - grid
    return high, values - high


def sums_by_bucket(cells: NDArray[np.int64], parts: Parts, size: int) -> Parts:
    """Return the sum of the [n] values in each bucket, [size], and its rounding error, from their summable parts."""
    high, low = (np.asarray(np.bincount(cells, part, size), dtype=np.float64) for part in parts)
    return high, low


def sums_by_run(starts: NDArray[np.int64], parts: Parts) -> Parts:
    """Return the sums from each start to the next, [R], as summable parts; `starts` ascend from 0."""
    high, low = parts
    return np.add.reduceat(high, starts), np.add.reduceat(low, starts)


@dataclass(frozen=True, slots=True, eq=False)
class CompensatedSums:
    """An array of compensated sums, [..., K]."""

    high: Float64
    low: Float64

    @classmethod
    def zeros(cls, *shape: int) -> CompensatedSums:
        """Return empty sums of this shape."""
        return cls(np.zeros(shape), np.zeros(shape))

    @classmethod
    def over_first_axis(cls, values: Float64, low: Float64 | None = None) -> CompensatedSums:
        """Return the sums of `values` (plus `low`, their rounding errors) over the first axis: [N, ...] → [...]."""
        high = np.asarray(values, dtype=np.float64)
        low = np.zeros_like(high) if low is None else low
        if high.shape[0] == 0:
            return cls.zeros(*high.shape[1:])
        while high.shape[0] > 1:
            # Add rows in pairs; the last of an odd number of rows goes to the next round.
            half = high.shape[0] // 2
            total, lost = two_sum(high[:half], high[half : 2 * half])
            lost = lost + (low[:half] + low[half : 2 * half])
            high, low = np.concatenate([total, high[2 * half :]]), np.concatenate([lost, low[2 * half :]])
        return cls(*_normalise(high[0], low[0]))

    @classmethod
    def of_columns(cls, columns: Iterable[Parts]) -> CompensatedSums:
        """Return [..., K] sums from K pairs of a sum and its rounding error, each [...]."""
        high, low = zip(*columns, strict=True)
        return cls(*_normalise(np.stack(high, axis=-1), np.stack(low, axis=-1)))

    def __add__(self, other: CompensatedSums) -> CompensatedSums:
        total, lost = two_sum(self.high, other.high)
        return CompensatedSums(*_normalise(total, lost + (self.low + other.low)))

    def add_rows(self, rows: NDArray[np.int64], values: CompensatedSums) -> None:
        """Add `values` [R, ...] to these rows, in place; no row may occur twice."""
        total = CompensatedSums(self.high[rows], self.low[rows]) + values
        self.high[rows], self.low[rows] = total.high, total.low

    def to_array(self) -> Float64:
        """Return both parts, [2, ..., K], as stored in blobs."""
        both = np.empty((2, *self.high.shape))
        both[0], both[1] = self.high, self.low
        return both

    @classmethod
    def from_array(cls, values: Float64) -> CompensatedSums:
        """Restore the sums from `to_array()`."""
        return cls(values[0], values[1])

    def exact(self, index: int) -> Fraction:
        """Return one of [K] sums as an exact rational number."""
        return Fraction(*self.exact_ratio(index))

    def exact_ratio(self, index: int) -> tuple[int, int]:
        """Return `exact` as a numerator and a denominator, which is a power of two; not reduced."""
        high, of_high = float(self.high[index]).as_integer_ratio()
        low, of_low = float(self.low[index]).as_integer_ratio()
        return high * of_low + low * of_high, of_high * of_low

    def at(self, index: int | tuple[int, ...]) -> float:
        """Return one of the sums as float64."""
        return float(self.high[index]) + float(self.low[index])

    @property
    def value(self) -> Float64:
        """The sums as float64."""
        return self.high + self.low


def _normalise(high: Float64, low: Float64) -> tuple[Float64, Float64]:
    """Return the same pair with `low` at most half a unit in the last place of `high`."""
    with np.errstate(invalid="ignore", over="ignore"):
        total = np.asarray(high + low)
        lost = np.asarray(low - (total - high))
    return total, np.where(np.isfinite(total), lost, 0.0)


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
