"""The shape k̂ of the tail of importance weights, from the largest weights.

Above a high threshold the weights of almost any distribution follow a generalised Pareto distribution with shape k.
Moments of order below 1/k are finite. At k ≥ ½ the variance of ρ is infinite, and with it the error of χ², of ESS and
of every importance-weighted mean; from about 0.7 the mean itself is unusable at any practical sample size; below 0 the
weights are bounded. In a sample of tokens k̂ describes the tail that was reached, which is what matters for an estimate
from that sample.

Sources: Zhang and Stephens, "A new and efficient estimation method for the generalized Pareto distribution" (2009);
Vehtari, Simpson, Gelman, Yao and Gabry, "Pareto smoothed importance sampling" (2024), for the size of the tail and the
weak prior towards ½.
"""

import math
from bisect import bisect_left, bisect_right

import numpy as np
from numpy.typing import NDArray

Float64 = NDArray[np.float64]

# Fewest values above the threshold for an estimate of the shape.
LEAST_TAIL = 5
# The prior: ten more values with the shape one half.
_PRIOR_VALUES, _PRIOR_SHAPE = 10.0, 0.5


def tail_size(count: int) -> int:
    """Return the number of weights in the tail of `count`: a fifth, at most 3·√count (Vehtari et al., section 3)."""
    return math.ceil(min(count / 5.0, 3.0 * math.sqrt(count)))


def pareto_shape(largest: Float64, count: int) -> float:
    """Return k̂ of the weights exp(`largest`), `count` in all.

    `largest` [n] are the n largest log weights, descending; if n < count the smallest of them is the lowest possible
    threshold, so the tail has at most n − 1 values. For ρ pass the largest d, for 1/ρ the largest −d. All computations
    are on logarithms relative to the largest: no weight overflows, and a common factor changes nothing.

    NaN if it cannot be estimated: fewer than LEAST_TAIL values are above the threshold, all of them are equal, or one
    is not finite. Raises ValueError if there are more values than `count`.
    """
    largest = np.asarray(largest, dtype=np.float64)
    if largest.size > count:
        raise ValueError(f"largest must have at most count values, got {largest.size} values, count={count}")
    size = min(tail_size(count), largest.size - 1)
    if size < LEAST_TAIL:
        return math.nan
    tail, threshold = largest[:size], largest[size]
    if not np.isfinite(tail[0]) or math.isnan(threshold) or np.isnan(tail).any():
        return math.nan
    tail = tail[tail > threshold]
    if tail.size < LEAST_TAIL or tail[0] == tail[-1]:
        return math.nan
    # log(exp(tail) − exp(threshold)): the logarithms of the exceedances.
    exceedances = tail + np.log(-np.expm1(threshold - tail))
    shape = _zhang_stephens(exceedances - exceedances[0])
    size = int(tail.size)
    return (size * shape + _PRIOR_VALUES * _PRIOR_SHAPE) / (size + _PRIOR_VALUES)


def _zhang_stephens(logs: Float64) -> float:
    """Return k of values above 0 from their logarithms [n], descending from 0 (the largest value is 1).

    The likelihood of the generalised Pareto distribution, written in θ = −k/σ, has its maximum over k in closed form:
    k(θ) = mean log(1 − θx). θ is averaged under its profile likelihood and a prior made from a quartile of the values,
    on a grid of θ_j = 1 + (1 − √(m/(j − ½)))/(3·quartile). θ_j · quartile is stored, which cannot overflow.
    """
    size = logs.size
    # The lower quartile is the value at ⌊n/4 + ½⌋ counted from the smallest.
    log_quartile = logs[size - math.floor(size / 4.0 + 0.5)]
    points = 30 + math.floor(math.sqrt(size))
    grid = math.exp(log_quartile) + (1.0 - np.sqrt(points / (np.arange(points) + 0.5))) / 3.0
    grid[grid == 0.0] = 1e-100  # there k(θ)/θ has a limit, which any small θ gives
    relative = logs - log_quartile
    shapes = _profile_shapes(grid, relative)
    log_likelihood = size * (np.log(np.abs(grid)) - np.log(np.abs(shapes)) - shapes - 1.0)
    weights = np.exp(log_likelihood - log_likelihood.max())
    return float(_profile_shapes(np.array([grid @ weights / weights.sum()]), relative)[0])


def _profile_shapes(thetas: Float64, logs: Float64) -> Float64:
    """Return k(θ) = mean log(1 − θ·exp(logs)) of each θ, [J] ascending; θ·exp(logs) < 1."""
    values: list[float] = thetas.tolist()
    shapes = np.zeros(len(values))
    for chosen, sign in ((slice(bisect_left(values, 0.0)), -1.0), (slice(bisect_right(values, 0.0), None), 1.0)):
        if values[chosen]:
            # math.log and np.log may differ in the last bit.
            scales = np.array([math.log(sign * theta) for theta in values[chosen]])
            products = scales[:, None] + logs
            terms = np.logaddexp(0.0, products) if sign < 0.0 else np.log1p(-np.exp(products))
            # Same as `mean`, without its checks.
            shapes[chosen] = np.add.reduce(terms, axis=1) / logs.size
    return shapes
