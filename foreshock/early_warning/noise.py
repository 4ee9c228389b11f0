"""Autocorrelated noise of a series: an upper estimate of AR(1) noise that outliers and trends hardly change.

Lengths and rewards of neighbouring steps depend on each other. With a lag-1 autocorrelation φ of 0.9 a mean over 20
steps is four times as noisy as one over 20 independent values, so a test that assumes independence sees surges in
healthy runs. Residuals that are prewhitened, r_t − φ r_{t−1}, are nearly independent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from foreshock.early_warning.robust import MAD_TO_SIGMA, median

LARGEST_AUTOCORRELATION = 0.98
"""Noise with a larger φ cannot be told from a random walk within a few hundred steps."""

CLIP = 3.0
"""Residuals count at most so many robust standard deviations: one outlier must not hide the autocorrelation."""

TREND_VALUES = 9
"""Values from which a trend is removed; a line through fewer follows the noise."""


@dataclass(frozen=True, slots=True)
class Noise:
    """AR(1) noise: φ and the standard deviation of the innovations, both upper estimates, from `values` values."""

    autocorrelation: float
    innovation: float
    values: int

    @property
    def deviation(self) -> float:
        """The standard deviation of a value."""
        return self.innovation / math.sqrt(1.0 - self.autocorrelation**2)

    def deviation_of_mean(self, values: int) -> float:
        """Return the standard deviation of a mean over `values` values in a row, from the long-run variance."""
        long_run = self.innovation / (1.0 - self.autocorrelation)
        return min(self.deviation, long_run / math.sqrt(values))


def autocorrelated_noise(segments: Sequence[Sequence[float]], least: float = 0.0) -> Noise:
    """Return the noise of values whose level differs by segment and may have a trend within each.

    φ is the autocorrelation of the clipped residuals, plus its bias in short series with a trend, (2 + 4φ) / n, plus
    one standard error (Kendall 1954; Marriott and Pope 1954). `least` is the smallest standard deviation of the
    innovations that is returned; it also holds if there are fewer than three values.
    """
    residuals = [residuals_of(segment) for segment in segments if len(segment) >= 2]
    count = sum(len(each) for each in residuals)
    if count < 3:
        return Noise(LARGEST_AUTOCORRELATION, max(least, 0.0), count)
    bound = CLIP * _scale([value for each in residuals for value in each])
    clipped = [[min(max(value, -bound), bound) for value in each] for each in residuals]
    squares = sum(value * value for each in clipped for value in each)
    products = sum(each[i] * each[i - 1] for each in clipped for i in range(1, len(each)))
    estimate = products / squares if squares > 0.0 else 0.0
    upper = estimate + (2.0 + 4.0 * estimate) / count + math.sqrt(max(1.0 - estimate**2, 0.1) / count)
    phi = min(max(upper, 0.0), LARGEST_AUTOCORRELATION)
    innovations = [each[i] - phi * each[i - 1] for each in residuals for i in range(1, len(each))]
    # One standard error of a robust scale, so that a small one by chance is no evidence.
    innovation = _scale(innovations) * (1.0 + 1.0 / math.sqrt(len(innovations)))
    return Noise(phi, max(innovation, least), count)


def residuals_of(values: Sequence[float]) -> list[float]:
    """Return the residuals of a resistant line; of the median alone if there are too few values for a trend."""
    slope = slope_of(values) if len(values) >= TREND_VALUES else 0.0
    flat = [value - slope * i for i, value in enumerate(values)]
    level = median(flat)
    return [value - level for value in flat]


def slope_of(values: Sequence[float]) -> float:
    """Return the slope per value of a resistant line: through the medians of the first and last third (Tukey)."""
    third = len(values) // 3
    return (median(values[-third:]) - median(values[:third])) / (len(values) - third)


def _scale(values: Sequence[float]) -> float:
    """Return a standard deviation: the larger of the scaled median deviation and the clipped root mean square."""
    robust = MAD_TO_SIGMA * median([abs(value) for value in values])
    bound = CLIP * robust
    clipped = math.sqrt(sum(min(value * value, bound * bound) for value in values) / len(values))
    return max(robust, clipped)
