"""Intervals of token means for skewed, heavy-tailed values: the bootstrap-t over prompt groups.

Half of k3 can come from a thousandth of the tokens. A batch without such tokens has a mean that is too low and an error
that is too small; Student's t, which is symmetric, then misses the true value on one side. The bootstrap-t resamples
groups with replacement, divides each resample's deviation by its own clustered error, and uses the quantiles of t* =
(m* − m)/e*. Low means come with small errors, so the interval extends further upwards.

The method was chosen by its coverage of the exact values of tiny policies, other ones than in the table of
`benchmarks/results/coverage.txt`. With 128 prompts × 8 rollouts all methods cover; they differ for few groups and heavy
tails. With 8 groups the percentile interval and BCa cover 84–89 %, the bootstrap-t 91–95 %. With 128 groups of very
uneven prompts, Student's t covers 88–94 %, the percentile interval and BCa 90–94 %, the bootstrap-t 92–95 %. (If
prompts that no batch contains carry χ², every method covers only about 70 %.) A bootstrap-t of the logarithm covers no
better and has infinite upper ends for few groups.

If prompts differ in scale, few groups often miss the large ones: with 8 groups and a log-standard deviation of |d| of
0.8 the bootstrap-t covers about 80 %. `nonnegative_intervals` widens the upper end from the spread of the groups and
covers about 93 % there; these are the ranges that Foreshock reports. The spread of the *logarithms* of the group means
still shows that larger groups exist. For log-normal group means with the log-variance s², the log of the mean has the
error √(s²/G + s⁴/(2(G − 1))) (Cox's method). `high_from_spread` uses this error around the sample mean, so that the end
converges to the mean for any distribution of the groups.

What limits the range of k3: too few prompt groups, or tokens so rare that most batches lack them. k3 ≈ d²/2 has a
finite variance if the shape k of the tail of |d| is below ¼; estimates k̂ scatter by about 0.05. The effective number
of groups is reported but is not a criterion: with uneven prompts, a batch with a low number contains one of the large
groups, and a batch that looks even lacks them.

Sources: Efron, "Nonparametric standard errors and confidence intervals" (1981); Hall, "The Bootstrap and Edgeworth
Expansion" (1992), for its second-order correctness; Cameron, Gelbach and Miller (2008), for clusters; Zhou and Gao,
"Confidence intervals for the log-normal mean" (1997), for Cox's method; Carter, Schnepel and Steigerwald, "Asymptotic
behavior of a t-test robust to cluster heterogeneity" (2017), and Kish (1965), for effective numbers of clusters.
"""

import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from foreshock.interval_names import RANGE
from foreshock.measures.estimators.intervals import Interval, student_t_quantile, sums_of_clusters
from foreshock.measures.statistics.tails import LARGEST_TAIL_SHAPE

Float64 = NDArray[np.float64]
Int64 = NDArray[np.int64]

RESAMPLES = 999  # so that 2.5 % and 97.5 % are order statistics
MORE_RESAMPLES = 3_999
"""Resamples of an interval that decides a verdict and is computed once: windows of steps and attributions. Another seed
moves an end by 2 to 5 % of the interval's width with 999, by 1 to 3 % with 3,999 (8 to 320 clusters, even and uneven);
80 clusters take 0.6 ms and 2 to 4 ms."""
SEED = 2009
# With fewer clusters, resamples of one repeated cluster, which have no error, reach the quantiles.
LEAST_CLUSTERS = 5
# More clusters are combined at random: the sums stay independent, and 2,048 suffice to estimate the skew.
_MOST_CLUSTERS = 2048
_DRAWS_AT_ONCE = 1 << 20
# Multiplications per product; BLAS libraries use more threads from about 2^18.
_MULTIPLIED_AT_ONCE = 1 << 16
_ROUNDING = 1e-12
# A difference below this share of its terms has lost digits that the result shows.
_CANCELLED = 0.01


def bootstrap_interval(
    sums: Float64, tokens: Int64, clusters: Int64 | None = None, *, resamples: int = RESAMPLES, seed: int = SEED
) -> Interval:
    """Return the nominal 95 % interval of Σ sums / Σ tokens, [N] each, one per rollout; `clusters` [N] is the group.

    Without `clusters` each rollout is its own cluster. Rollouts without tokens are excluded. The bounds are NaN below
    LEAST_CLUSTERS clusters, if sums are not finite, and if one cluster contributes all but a millionth of the mean,
    because resamples without it carry no information. The same input gives the same interval.
    """
    return bootstrap_intervals(sums[:, None], tokens, clusters, resamples=resamples, seed=seed)[0]


def bootstrap_intervals(
    sums: Float64,
    tokens: Int64 | Float64,
    clusters: Int64 | None = None,
    *,
    resamples: int = RESAMPLES,
    seed: int = SEED,
) -> tuple[Interval, ...]:
    """Return the intervals of the K columns of `sums` [N, K], all from the same resamples; see `bootstrap_interval`.

    `tokens` may be any weights ≥ 0: shares E[d_link·d]/E[d²] have the sums of d².
    """
    return _intervals(*sums_of_clusters(sums, tokens, clusters), resamples, seed)


def _intervals(of_clusters: Float64, sizes: Float64, resamples: int, seed: int) -> tuple[Interval, ...]:
    """Return `bootstrap_intervals` from the sums [G, K] and the tokens [G] of each cluster."""
    count, columns = int(sizes.size), int(of_clusters.shape[1])
    if count == 0:
        return (Interval(math.nan, math.nan, math.nan, 0),) * columns
    low = high = np.full(columns, math.nan)
    with np.errstate(invalid="ignore", over="ignore"):
        means = of_clusters.sum(axis=0) / sizes.sum()
        if count >= LEAST_CLUSTERS:
            random = np.random.default_rng(seed)
            if count > _MOST_CLUSTERS:
                order = random.permutation(count)
                starts = np.arange(_MOST_CLUSTERS) * count // _MOST_CLUSTERS
                of_clusters = np.add.reduceat(of_clusters[order], starts, axis=0)
                sizes = np.add.reduceat(sizes[order], starts)
            expected = means * sizes[:, None]
            residuals = of_clusters - expected
            # If all clusters have the same mean, only rounding is left; it does not count as spread.
            residuals[np.abs(residuals) <= _ROUNDING * np.abs(expected)] = 0.0
            errors = np.sqrt(np.square(residuals).sum(axis=0)) / sizes.sum()
            below, above = _quantiles(_studentised(of_clusters, residuals, sizes, resamples, random))
            low = np.where(errors > 0.0, means - above * errors, means + 0.0 * errors)
            high = np.where(errors > 0.0, means - below * errors, means + 0.0 * errors)
    unknown = ~(np.isfinite(low) & np.isfinite(high))
    low, high = np.where(unknown, math.nan, low), np.where(unknown, math.nan, high)
    return tuple(Interval(float(means[k]), float(low[k]), float(high[k]), count) for k in range(columns))


def nonnegative_intervals(
    sums: Float64, tokens: Int64 | Float64, clusters: Int64 | None = None, *, resamples: int = RESAMPLES
) -> tuple[Interval, ...]:
    """Return the intervals (nominally 95 %) of K means of terms that are never negative, such as k3, χ² and TV.

    The arguments are those of `bootstrap_intervals`. The upper end is that of the bootstrap-t, or of
    `high_from_spread` if that is higher; the lower end is at least 0.
    """
    of_clusters, sizes = sums_of_clusters(sums, tokens, clusters)
    ends: list[float] = high_from_spread(of_clusters, sizes).tolist()
    # `max` returns its first argument if the end is NaN.
    return tuple(
        Interval(found.mean, max(found.low, 0.0), max(found.high, end), found.clusters)
        if math.isfinite(found.high)
        else found
        for found, end in zip(_intervals(of_clusters, sizes, resamples, SEED), ends, strict=True)
    )


def _studentised(
    of_clusters: Float64, residuals: Float64, sizes: Float64, resamples: int, random: np.random.Generator
) -> Float64:
    """Return (m* − m)/e* of ratio means, [resamples, K], from sums S [G, K], residuals S − m·T [G, K] and sizes T [G].

    A resample weighs cluster g by the number of its draws, w_g. With δ = Σwe/ΣwT = m* − m its residuals are e − δT, so
    Σw(e − δT)² needs only sums over w. Factors common to e* and the error of the sample are omitted.
    """
    groups, columns = residuals.shape
    table = np.concatenate(
        [sizes[:, None], np.square(sizes)[:, None], residuals, residuals * sizes[:, None], np.square(residuals)], axis=1
    )
    found = np.empty((resamples, columns))
    at_once = max(1, _DRAWS_AT_ONCE // groups)
    for start in range(0, resamples, at_once):
        rows = min(at_once, resamples - start)
        # How often each cluster is drawn in each resample, [rows, G].
        drawn = random.integers(0, groups, size=(rows, groups))
        drawn += np.arange(0, rows * groups, groups)[:, None]
        weights = np.bincount(drawn.ravel(), minlength=rows * groups).reshape(rows, groups).astype(np.float64)
        total, total_squares, *_ = (sums := _product(weights, table)).T[:, :, None]
        of_residuals, of_products, of_squares = (sums[:, 2 + columns * part :][:, :columns] for part in range(3))
        shift = of_residuals / total
        shifted = np.square(shift) * total_squares
        squares = of_squares - 2.0 * shift * of_products + shifted
        # If the terms cancel, only rounding is left, and it differs between the matrix products of two CPUs. This
        # happens if a resample lacks the one large cluster: m* is far below m. Compute its residuals as S − m*·T.
        cancelled = squares <= _CANCELLED * (of_squares + shifted)
        for column in np.flatnonzero(cancelled.any(axis=0)).tolist():
            at = np.flatnonzero(cancelled[:, column])
            chosen = weights[at]
            sums_of_column = of_clusters[:, column]
            mean = (chosen * sums_of_column).sum(axis=1) / total[at, 0]
            shift[at, column] = (chosen * residuals[:, column]).sum(axis=1) / total[at, 0]
            squares[at, column] = (chosen * np.square(sums_of_column - mean[:, None] * sizes)).sum(axis=1)
        # A difference within rounding is 0: such a resample has no error, and t* is infinite.
        squares[squares <= _ROUNDING * (of_squares + shifted)] = 0.0
        error = np.sqrt(squares) / total
        has_error = error > 0.0
        if has_error.all():
            np.divide(shift, error, out=found[start : start + rows])
        else:
            found[start : start + rows] = np.where(
                has_error, shift / np.where(has_error, error, 1.0), np.where(shift == 0.0, 0.0, shift * math.inf)
            )
    return found


def _product(weights: Float64, table: Float64) -> Float64:
    """Return weights @ table, in parts so small that a BLAS library multiplies them on one thread.

    After larger products its other threads spin for tens of milliseconds, and slow down the next measurement.
    """
    at_once = max(1, _MULTIPLIED_AT_ONCE // table.size)
    parts = [weights[start : start + at_once] @ table for start in range(0, weights.shape[0], at_once)]
    return np.concatenate(parts)


def _quantiles(values: Float64) -> tuple[Float64, Float64]:
    """Return the 2.5 % and 97.5 % quantiles of each column of [R, K], [K] each; quantile p has the rank p·(R + 1)."""
    last = values.shape[0] - 1
    ranked = np.sort(values, axis=0)
    found = []
    for probability in (0.025, 0.975):
        place = min(max(probability * (last + 2) - 1.0, 0.0), float(last))
        lower, upper = ranked[math.floor(place)], ranked[math.ceil(place)]
        found.append(np.where(lower == upper, lower, lower + (place - math.floor(place)) * (upper - lower)))
    return found[0], found[1]


# A group mean below this fraction of the mean counts as this fraction: only the spread of the large groups matters, and
# a group without any mismatch has no logarithm.
_LEAST_GROUP_MEAN = 0.01


def effective_number(total: float, square_sum: float) -> float:
    """Return (Σ S_g)²/Σ S_g² from `total` = Σ S_g and `square_sum` = Σ S_g², S_g ≥ 0 the sums of G groups.

    G if all groups contribute the same, 1 if one contributes everything; NaN if no group contributes anything or a sum
    is not finite.
    """
    if not 0.0 < square_sum < math.inf or not 0.0 < total < math.inf:
        return math.nan
    root = total / math.sqrt(square_sum)
    return root * root


def high_from_spread(sums: Float64, tokens: Float64) -> Float64:
    """Return the upper 97.5 % ends of Σ sums / Σ tokens, [K], from the sums [G, K] ≥ 0 and the tokens [G] of G groups.

    The error of the logarithm is the larger of the clustered relative error and Cox's, with G replaced by (Σ T)²/Σ T²
    if groups differ in their numbers of tokens; the quantile is Student's with G − 1 degrees of freedom. NaN below two
    groups and if the mean is 0 or not finite.
    """
    groups = int(tokens.size)
    if groups < 2:
        return np.full(sums.shape[1], math.nan)
    with np.errstate(all="ignore"):
        total = tokens.sum()
        means = sums.sum(axis=0) / total
        squares = np.square(sums / means - tokens[:, None]).sum(axis=0)
        clustered = squares * groups / (groups - 1) / total**2
        logs = np.log(np.maximum(sums / tokens[:, None] / means, _LEAST_GROUP_MEAN))
        spread = logs.var(axis=0, ddof=1)
        count = total**2 / np.square(tokens).sum()
        of_spread = spread / count + np.square(spread) / (2.0 * max(count - 1.0, 1.0))
        error = np.sqrt(np.maximum(clustered, of_spread))
        high: Float64 = means * np.exp(student_t_quantile(0.975, groups - 1) * error)
    return np.where(np.isfinite(high) & (means > 0.0), high, math.nan)


Values = Mapping[str, float | None]


def interval_warning(values: Values) -> str | None:
    """Return a sentence on why the range of k3 is too short or impossible; None if no reason is known.

    `values` are measures by column: `prompt_groups`, `pareto_k` and `pareto_k_inverse`.
    """
    groups = _value(values, "prompt_groups")
    known = [shape for name in ("pareto_k", "pareto_k_inverse") if not math.isnan(shape := _value(values, name))]
    shape = max(known, default=math.nan)
    if groups < LEAST_CLUSTERS:
        return (
            f"{groups:.0f} prompt group{'' if groups == 1 else 's'}: a range of k3 needs {LEAST_CLUSTERS}. "
            "Use more prompts per step."
        )
    if math.isnan(groups) or not shape > LARGEST_TAIL_SHAPE:
        return None
    return (
        f"The tail of d has the shape k̂ = {shape:.2f}, above {LARGEST_TAIL_SHAPE:g}: tokens too rare for this batch "
        f"may carry much of k3, and its mean may lie far above the {RANGE}."
    )


def effective_of_all(values: Values) -> str:
    """Return the effective number of prompt groups and their number, such as "5.2 of 8"; "–" if not measured."""
    effective, groups = _value(values, "effective_groups"), _value(values, "prompt_groups")
    return "–" if math.isnan(effective) or math.isnan(groups) else f"{effective:.1f} of {groups:.0f}"


def _value(values: Values, name: str) -> float:
    value = values.get(name)
    return math.nan if value is None else float(value)
