"""Confidence intervals of token means, clustered by prompt group.

Rollouts of one prompt are dependent, and so are the tokens of one rollout. The error of a token mean m = ΣS_g / ΣT_g
over groups g follows from the residuals e_g = S_g − m·T_g (1.3–1.8 times the error for independent tokens), with
Student's t at G − 1 degrees of freedom.

Against exact values of a tiny policy this covers 94 to 95 % for k3, χ² and TV with 128 groups, 93 to 95 % with
32, and 90 to 94 % with 8. It misses on one side, below, for skewed values; degrees of freedom from the residuals'
kurtosis gain at most one percentage point if groups are alike. `bootstrap.py` corrects this if there is one row per
rollout. This interval needs mergeable sums only.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from foreshock.json_values import Measured

Float64 = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Interval:
    """A two-sided interval of `mean`, nominally 95 %; the bounds are NaN with fewer than two clusters."""

    mean: Measured
    low: Measured
    high: Measured
    clusters: int

    def never_negative(self) -> Interval:
        """Return the interval clipped at 0, for a mean of terms that are never negative; this keeps its coverage."""
        return replace(self, low=0.0) if self.low < 0.0 else self


def sums_of_clusters(
    sums: Float64, tokens: NDArray[np.int64] | Float64, clusters: NDArray[np.int64] | None
) -> tuple[Float64, Float64]:
    """Return the sums [G, K] and tokens [G] of each cluster that has tokens, from those of rollouts, [N, K] and [N]."""
    sizes: Float64 = tokens.astype(np.float64)
    if clusters is not None:
        numbers = _numbers_of(clusters)
        if numbers.size and int(numbers[-1]) == numbers.size - 1:
            # Each rollout is its own cluster, already in order. Add 0.0, as `bincount` does: −0.0 becomes 0.0.
            sizes, sums = sizes + 0.0, np.add(sums, 0.0, dtype=np.float64, order="C")
        else:
            sizes = np.bincount(numbers, weights=sizes).astype(np.float64)
            sums = np.stack([np.bincount(numbers, weights=column, minlength=sizes.size) for column in sums.T], axis=1)
    with_tokens = sizes > 0
    return sums[with_tokens], sizes[with_tokens]


def _numbers_of(clusters: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the rank of each row's cluster among the distinct clusters, [N]; fast if rows are sorted by cluster."""
    steps = clusters[1:] - clusters[:-1]
    if (steps < 0).any():
        unsorted: NDArray[np.int64] = np.unique(clusters, return_inverse=True)[1]
        return unsorted
    numbers = np.zeros(clusters.size, np.int64)
    np.cumsum(steps > 0, out=numbers[1:])
    return numbers


def interval_from_residuals(mean: float, square_sum: float, tokens: int, clusters: int) -> Interval:
    """Return the interval of a ratio mean from Σ e_g², the number of tokens, and the number of clusters."""
    if clusters < 2 or tokens == 0 or not math.isfinite(square_sum) or not math.isfinite(mean):
        return Interval(mean, math.nan, math.nan, clusters)
    error = math.sqrt(max(square_sum, 0.0) * clusters / (clusters - 1)) / tokens
    reach = student_t_quantile(0.975, clusters - 1) * error
    return Interval(mean, mean - reach, mean + reach, clusters)


@functools.lru_cache(maxsize=4096)
def student_t_quantile(probability: float, degrees: int) -> float:
    """Return the quantile of Student's t with `degrees` ≥ 1 degrees of freedom at `probability` ≥ 0.5."""
    tail = 1.0 - probability
    low, high = 0.0, 1.0
    while _upper_tail(high, degrees) > tail:
        high *= 2.0
    for _ in range(200):
        middle = 0.5 * (low + high)
        if middle in (low, high):
            break
        low, high = (middle, high) if _upper_tail(middle, degrees) > tail else (low, middle)
    return 0.5 * (low + high)


def _upper_tail(value: float, degrees: int) -> float:
    """Return P(t > value) for value ≥ 0: half the regularised incomplete beta function at ν / (ν + t²)."""
    x = degrees / (degrees + value * value)
    return 0.5 * _incomplete_beta(0.5 * degrees, 0.5, x)


def _incomplete_beta(a: float, b: float, x: float) -> float:
    """Return the regularised incomplete beta function by Lentz's continued fraction (Numerical Recipes, 6.4)."""
    if x <= 0.0 or x >= 1.0:
        return 0.0 if x <= 0.0 else 1.0
    if x > (a + 1.0) / (a + b + 2.0):
        return 1.0 - _incomplete_beta(b, a, 1.0 - x)
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x))
    c, d = 1.0, 1.0 / (1.0 - (a + b) * x / (a + 1.0))
    fraction = d
    for m in range(1, 10_000):
        even = m * (b - m) * x / ((a + 2 * m - 1.0) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1.0))
        for step in (even, odd):
            d = 1.0 / (1.0 + step * d)
            c = 1.0 + step / c
            fraction *= c * d
        if abs(c * d - 1.0) < 1e-16:
            break
    return front * fraction / a
