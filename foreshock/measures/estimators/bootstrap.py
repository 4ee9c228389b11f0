"""Intervals of token means for skewed, heavy-tailed values: the bootstrap-t over prompt groups.

Half of k3 can sit in a thousandth of the tokens. A batch that lacks them has a mean that is too low and, at the same
time, an error that is too small; Student's t, which is symmetric, then misses the truth on one side. The bootstrap-t
draws groups again with replacement, studentises each resample by its own clustered error, and reads the quantiles of
t* = (m* − m)/e*; so it sees that low means come with small errors, and reaches further up where that is so.

It was chosen by the coverage experiment of `benchmarks/coverage.py`, on policies other than the ones whose table is in
`benchmarks/results/coverage.txt`. Over 128 prompts × 8 rollouts all kinds hold; the kinds differ with few groups and
heavy tails. With 8 groups the percentile interval covers 84–89 %, BCa no more, the bootstrap-t 91–95 %; with 128 groups
of very uneven prompts, Student's t 88–94 %, the percentile interval and BCa 90–94 %, the bootstrap-t 92–95 % (where
prompts that no batch holds carry χ², none covers: about 70 %). A bootstrap-t of the logarithm covers no better and
has endless upper ends with few groups.

Sources: Efron, "Nonparametric standard errors and confidence intervals" (1981); Hall, "The Bootstrap and Edgeworth
Expansion" (1992), for its second-order correctness; Cameron, Gelbach and Miller (2008), for clusters.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from foreshock.measures.estimators.intervals import Interval, sums_of_clusters

__all__ = ["LEAST_CLUSTERS", "RESAMPLES", "bootstrap_interval", "bootstrap_intervals"]

Float64 = NDArray[np.float64]
Int64 = NDArray[np.int64]

RESAMPLES = 999  # so that 2.5 % and 97.5 % are order statistics
SEED = 2009
# With fewer, resamples that hold a single cluster, and so have no error, reach into the quantiles.
LEAST_CLUSTERS = 5
# More are put together by lot: their sums are as independent, and 2,048 are enough to know a skew by.
_MOST_CLUSTERS = 2048
_DRAWS_AT_ONCE = 1 << 20
# Multiplications; BLAS libraries take more threads from about 2^18 on.
_MULTIPLIED_AT_ONCE = 1 << 16
_ROUNDING = 1e-12


def bootstrap_interval(
    sums: Float64, tokens: Int64, clusters: Int64 | None = None, *, resamples: int = RESAMPLES, seed: int = SEED
) -> Interval:
    """The 95 % interval of Σ sums / Σ tokens, both [N], one per rollout; `clusters` [N] names each rollout's group.

    Without `clusters` each rollout is one. Rollouts without tokens take no part. The bounds are NaN below
    LEAST_CLUSTERS clusters, where sums are not finite, and where one cluster makes all but a millionth of the mean, so
    that resamples without it say nothing. The same input gives the same interval.
    """
    return bootstrap_intervals(sums[:, None], tokens, clusters, resamples=resamples, seed=seed)[0]


def bootstrap_intervals(
    sums: Float64, tokens: Int64, clusters: Int64 | None = None, *, resamples: int = RESAMPLES, seed: int = SEED
) -> tuple[Interval, ...]:
    """The intervals of the K columns of `sums` [N, K], all from the same resamples; see `bootstrap_interval`."""
    of_clusters, sizes = sums_of_clusters(sums, tokens, clusters)
    count, columns = int(sizes.size), int(of_clusters.shape[1])
    if count == 0:
        return (Interval(math.nan, math.nan, math.nan, 0),) * columns
    low = high = np.full(columns, math.nan)
    with np.errstate(invalid="ignore", over="ignore"):
        means = of_clusters.sum(axis=0) / sizes.sum()
        if count >= LEAST_CLUSTERS:
            random = np.random.default_rng(seed)
            residuals, sizes = _put_together(of_clusters - means * sizes[:, None], sizes, random)
            errors = np.sqrt(np.square(residuals).sum(axis=0)) / sizes.sum()
            below, above = _quantiles(_studentised(residuals, sizes, resamples, random))
            low = np.where(errors > 0.0, means - above * errors, means + 0.0 * errors)
            high = np.where(errors > 0.0, means - below * errors, means + 0.0 * errors)
    unknown = ~(np.isfinite(low) & np.isfinite(high))
    low, high = np.where(unknown, math.nan, low), np.where(unknown, math.nan, high)
    return tuple(Interval(float(means[k]), float(low[k]), float(high[k]), count) for k in range(columns))


def _put_together(residuals: Float64, sizes: Float64, random: np.random.Generator) -> tuple[Float64, Float64]:
    """The same in at most _MOST_CLUSTERS clusters, the members of each drawn by lot."""
    if sizes.size <= _MOST_CLUSTERS:
        return residuals, sizes
    order = random.permutation(sizes.size)
    starts = np.arange(_MOST_CLUSTERS) * sizes.size // _MOST_CLUSTERS
    return np.add.reduceat(residuals[order], starts, axis=0), np.add.reduceat(sizes[order], starts)


def _studentised(residuals: Float64, sizes: Float64, resamples: int, random: np.random.Generator) -> Float64:
    """[resamples, K] (m* − m)/e* of ratio means from residuals S − m·T [G, K] and sizes T [G].

    A resample weighs cluster g by how often it was drawn, w_g. With δ = Σwe/ΣwT = m* − m its residuals are e − δT,
    so that Σw(e − δT)² needs only sums over w. The factors that e* and the error of the sample share are left out.
    """
    groups, columns = residuals.shape
    table = np.concatenate(
        [sizes[:, None], np.square(sizes)[:, None], residuals, residuals * sizes[:, None], np.square(residuals)], axis=1
    )
    found = np.empty((resamples, columns))
    at_once = max(1, _DRAWS_AT_ONCE // groups)
    for start in range(0, resamples, at_once):
        rows = min(at_once, resamples - start)
        drawn = random.integers(0, groups, size=(rows, groups))
        drawn += np.arange(0, rows * groups, groups)[:, None]
        weights = np.bincount(drawn.ravel(), minlength=rows * groups).reshape(rows, groups).astype(np.float64)
        total, total_squares, *_ = (sums := _product(weights, table)).T[:, :, None]
        of_residuals, of_products, of_squares = np.split(sums[:, 2:], 3, axis=1)
        shift = of_residuals / total
        shifted = np.square(shift) * total_squares
        squares = of_squares - 2.0 * shift * of_products + shifted
        # What is left of larger terms by their rounding is no error; a resample without one is as far off as can be.
        squares[squares <= _ROUNDING * (of_squares + shifted)] = 0.0
        error = np.sqrt(squares) / total
        found[start : start + rows] = np.where(
            error > 0.0, shift / np.where(error > 0.0, error, 1.0), np.where(shift == 0.0, 0.0, shift * math.inf)
        )
    return found


def _product(weights: Float64, table: Float64) -> Float64:
    """weights @ table in parts so small that a BLAS multiplies them on this thread.

    Its other threads would go on spinning for tens of milliseconds after a larger product, and take the processors from
    whatever is measured next.
    """
    at_once = max(1, _MULTIPLIED_AT_ONCE // table.size)
    parts = [weights[start : start + at_once] @ table for start in range(0, weights.shape[0], at_once)]
    return np.concatenate(parts)


def _quantiles(values: Float64) -> tuple[Float64, Float64]:
    """[K] the 2.5 % and 97.5 % quantiles of each column of [R, K], the p-th being the value of rank p·(R + 1)."""
    last = values.shape[0] - 1
    ranked = np.sort(values, axis=0)
    found = []
    for probability in (0.025, 0.975):
        place = min(max(probability * (last + 2) - 1.0, 0.0), float(last))
        lower, upper = ranked[math.floor(place)], ranked[math.ceil(place)]
        found.append(np.where(lower == upper, lower, lower + (place - math.floor(place)) * (upper - lower)))
    return found[0], found[1]
