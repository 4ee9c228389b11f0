"""Compensated float64 sums: a value is a pair (high, low) of float64 whose unrounded sum it is.

A pair carries about 106 bits, so sums of pairs, in whatever order and however split into shards, agree in all the bits
that a float64 shows. (Dekker 1971; Shewchuk 1997.) An infinite term makes the sum infinite, never NaN.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

__all__ = ["CompensatedSums", "summable_parts", "sums_by_bucket", "sums_by_run", "two_product", "two_sum"]

Float64 = NDArray[np.float64]
# A value or a sum as the pair of a float64 and what its rounding lost.
Parts = tuple[Float64, Float64]

_SPLITTER = 134_217_729.0  # 2^27 + 1: cuts a float64 into two halves whose products are exact


def two_sum(a: Float64, b: Float64) -> tuple[Float64, Float64]:
    """a + b rounded, and exactly what the rounding lost (0 where the sum is not finite)."""
    with np.errstate(invalid="ignore", over="ignore"):
        total = a + b
        of_b = total - a
        lost = (a - (total - of_b)) + (b - of_b)
    return total, np.where(np.isfinite(total), lost, 0.0)


def two_product(a: Float64, b: Float64) -> tuple[Float64, Float64]:
    """a · b rounded, and exactly what the rounding lost (0 where a factor is too large to be split)."""
    with np.errstate(invalid="ignore", over="ignore"):
        total = a * b
        a_high = _SPLITTER * a - (_SPLITTER * a - a)
        b_high = _SPLITTER * b - (_SPLITTER * b - b)
        a_low, b_low = a - a_high, b - b_high
        lost = a_low * b_low - (((total - a_high * b_high) - a_low * b_high) - a_high * b_low)
    return total, np.where(np.isfinite(lost), lost, 0.0)


def summable_parts(values: Float64) -> Parts:
    """[n] values as high + low, exactly, so that sums of any of the high parts are exact, in whatever order.

    The high parts are multiples of one power of two, and too few for their sum to leave a float64; the low parts are
    about n · 2^-52 of the largest value, so that their sums lose nothing that matters. Where a value is not finite, the
    high parts are 0. (ExtractVector in Rump, Ogita and Oishi, "Accurate floating-point summation" (2008).)
    """
    largest = max(float(np.max(values, initial=0.0)), -float(np.min(values, initial=0.0)))
    bits = math.frexp(largest)[1] + (values.size + 2).bit_length() if math.isfinite(largest) else 2000
    if bits > 1023:
        return np.zeros_like(values), values
    grid = math.ldexp(1.0, bits)
    high = (grid + values) - grid
    return high, values - high


def sums_by_bucket(cells: NDArray[np.int64], parts: Parts, size: int) -> Parts:
    """[size] the sum of the [n] values in each cell, and what its rounding lost, from the summable parts."""
    high, low = (np.asarray(np.bincount(cells, part, size), dtype=np.float64) for part in parts)
    return high, low


def sums_by_run(starts: NDArray[np.int64], parts: Parts) -> Parts:
    """[R] the sums from each start to the next, as summable parts again; `starts` rise from 0."""
    high, low = parts
    return np.add.reduceat(high, starts), np.add.reduceat(low, starts)


@dataclass(frozen=True, slots=True, eq=False)
class CompensatedSums:
    """An array of compensated sums, [..., K]."""

    high: Float64
    low: Float64

    @classmethod
    def zeros(cls, *shape: int) -> CompensatedSums:
        """Sums of nothing."""
        return cls(np.zeros(shape), np.zeros(shape))

    @classmethod
    def over_first_axis(cls, values: Float64, low: Float64 | None = None) -> CompensatedSums:
        """The sums of `values` (plus `low`, their rounding errors, if known) over the first axis: [N, ...] → [...]."""
        high = np.asarray(values, dtype=np.float64)
        low = np.zeros_like(high) if low is None else low
        if high.shape[0] == 0:
            return cls.zeros(*high.shape[1:])
        while high.shape[0] > 1:
            half = high.shape[0] // 2
            total, lost = two_sum(high[:half], high[half : 2 * half])
            lost = lost + (low[:half] + low[half : 2 * half])
            # An odd one out waits for the next round.
            high = np.concatenate([total, high[2 * half :]])
            low = np.concatenate([lost, low[2 * half :]])
        return cls(*_normalise(high[0], low[0]))

    @classmethod
    def of_columns(cls, columns: Iterable[Parts]) -> CompensatedSums:
        """[..., K] from K pairs of a sum and what its rounding lost, each [...]."""
        high, low = zip(*columns, strict=True)
        return cls(*_normalise(np.stack(high, axis=-1), np.stack(low, axis=-1)))

    def __add__(self, other: CompensatedSums) -> CompensatedSums:
        total, lost = two_sum(self.high, other.high)
        return CompensatedSums(*_normalise(total, lost + (self.low + other.low)))

    def add_rows(self, rows: NDArray[np.int64], values: CompensatedSums) -> None:
        """Add `values` [R, ...] to these rows, in place; no row may be named twice."""
        total = CompensatedSums(self.high[rows], self.low[rows]) + values
        self.high[rows], self.low[rows] = total.high, total.low

    def to_array(self) -> Float64:
        """Both parts, [2, ..., K], as blobs hold them."""
        return np.stack([self.high, self.low])

    @classmethod
    def from_array(cls, values: Float64) -> CompensatedSums:
        """The sums of `to_array()`."""
        return cls(values[0], values[1])

    def exact(self, index: int) -> Fraction:
        """One of [K] sums as an exact rational number."""
        return Fraction(float(self.high[index])) + Fraction(float(self.low[index]))

    @property
    def value(self) -> Float64:
        """The sums as float64."""
        return self.high + self.low


def _normalise(high: Float64, low: Float64) -> tuple[Float64, Float64]:
    """The same pair with `low` no larger than half a unit in the last place of `high`."""
    with np.errstate(invalid="ignore", over="ignore"):
        total = np.asarray(high + low)
        lost = np.asarray(low - (total - high))
    return total, np.where(np.isfinite(total), lost, 0.0)
