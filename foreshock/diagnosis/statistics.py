"""Statistics of the detectors: medians, autocorrelated noise, evidence for a change, and exact intervals of counts.

Noise. Lengths and rewards of neighbouring steps depend on each other. With a lag-1 autocorrelation φ of 0.9 a mean over
20 steps is four times as noisy as one over 20 independent values, so a test that assumes independence sees surges in
healthy runs. Residuals that are prewhitened, r_t − φ r_{t−1}, are nearly independent.

Evidence, by e-detectors. Without a change each factor below has an expectation of at most 1, given the earlier values.
The Shiryaev-Roberts sum over all possible onsets, ``M_t = (M_{t−1} + 1) · factor_t``, averaged over some λ, then has an
expectation of at most t at any stopping time t. An alarm at M ≥ A therefore has an average run length to a false alarm
of at least A values, and the probability of one within n values is at most n / A (Shin, Ramdas and Rinaldo 2022,
"E-detectors"; mixture over λ: Robbins 1970).

- A rise of a series above its baseline: prewhitened residuals z that are N(0, 1) without a rise have the factor
  ``exp(λ z − λ² / 2)``. They are capped above, which only lowers M. The guarantee assumes known noise;
  `benchmarks/diagnosis` measures the false alarms with estimated noise.
- Pooled rules, for values that are noisy at one step. They assume no shape of the distribution.
  "mean": values X ≥ 0 whose mean is at most the threshold m have the factor ``1 + λ (min(X / m, c) − 1)``, 0 < λ < 1
  (testing by betting: Waudby-Smith and Ramdas 2024). With the cap c no single step is an alarm.
  "deviation": standardised values z of mean 0 whose tails are at most those of a normal distribution have the factor
  ``exp(λ z − λ² / 2)``, for λ of either sign.
  "median" pools no evidence over all steps: it is the median of the newest five values, for quantities that fall and
  rise again within a few steps, such as the effective sample size of rollouts that lag. One bad step would dominate a
  mean.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from statistics import median
from typing import Final, Literal

MAD_TO_SIGMA = 1.4826
"""Standard deviation / median absolute deviation of a normal distribution."""


def step_noise(values: Sequence[float]) -> float:
    """Return the standard deviation of step-to-step noise, from absolute successive differences (robust to a trend).

    An upper estimate: with few differences the median may be small by chance, so it is widened by 1 + 1.5 / √n (about
    two standard errors of a median of absolute values). 0 with fewer than three values.
    """
    if len(values) < 3:
        return 0.0
    differences = [abs(later - earlier) for earlier, later in pairwise(values)]
    widening = 1.0 + 1.5 / math.sqrt(len(differences))
    return MAD_TO_SIGMA * widening * median(differences) / math.sqrt(2.0)


LARGEST_AUTOCORRELATION = 0.98
"""Largest φ of noise that differs from a random walk within a few hundred steps."""

CLIP = 3.0
"""Robust standard deviations at which residuals are clipped, so that one outlier does not hide the autocorrelation."""

LEAST_DISTANCES = 6
"""Differences of values n apart are used if the series has at least this many times n values."""

TREND_VALUES = 9
"""Least number of values for removing a trend; a line through fewer follows the noise."""


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

    @property
    def of_neighbours(self) -> float:
        """The standard deviation of the difference of two neighbours, divided by √2."""
        return self.innovation / math.sqrt(1.0 + self.autocorrelation)

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
    # Add one standard error of a robust scale, because a scale may be small by chance.
    innovation = _scale(innovations) * (1.0 + 1.0 / math.sqrt(len(innovations)))
    return Noise(phi, max(innovation, least), count)


def neighbour_noise(values: Sequence[float]) -> Noise:
    """Return the noise of values from differences of neighbours, so that a ramp or a step among them is not noise.

    Differences between values 1, 2, 4 and 8 apart are centred and clipped; half of the largest variance is that of a
    value, and φ is the fraction by which that of neighbours is smaller.
    """
    if len(values) < 3:
        return Noise(LARGEST_AUTOCORRELATION, 0.0, len(values))
    nearest = _variance([later - earlier for earlier, later in pairwise(values)])
    far = [
        _variance([values[i] - values[i - apart] for i in range(apart, len(values))])
        for apart in (2, 4, 8)
        if LEAST_DISTANCES * apart <= len(values)
    ]
    largest = max([nearest, *far])
    phi = min(1.0 - nearest / largest, LARGEST_AUTOCORRELATION) if largest > 0.0 else 0.0
    return Noise(phi, math.sqrt(0.5 * largest * (1.0 - phi**2)), len(values))


def bend_of(values: Sequence[float], least: int) -> tuple[int, float]:
    """Return where a line bends that is level and then slopes, after at least `least` values, and its level.

    The fit has the least squares; `values` are more than `least`.
    """
    count, mean = len(values), sum(values) / len(values)
    best = (-1.0, least, mean)
    for bend in range(least, count):
        beyond = count - bend
        # x is 0 before the bend and 1 … beyond from there on.
        of_x = beyond * (beyond + 1) / 2.0 / count
        squares = beyond * (beyond + 1) * (2 * beyond + 1) / 6.0 - count * of_x**2
        products = sum(place * values[bend - 1 + place] for place in range(1, beyond + 1)) - count * of_x * mean
        if products**2 / squares > best[0]:
            best = products**2 / squares, bend, mean - of_x * products / squares
    return best[1:]


def swing_about_peak(values: Sequence[float], peak: int) -> float:
    """Return the root mean square that the best curve leaves of values which rises up to `peak` and falls from there.

    Noise and swings are left, of whatever shape the rise and the fall are (isotonic regression).
    """
    curve = [*_rising(values[:peak]), *reversed(_rising(values[: peak - 1 if peak else None : -1]))]
    return math.sqrt(sum((value - each) ** 2 for value, each in zip(values, curve, strict=True)) / len(values))


def _rising(values: Sequence[float]) -> list[float]:
    """Return the nearest values, in squares, that never fall: neighbours that fall are pooled."""
    pools: list[tuple[float, int]] = []
    for value in values:
        mean, count = value, 1
        while pools and pools[-1][0] > mean:
            before, more = pools.pop()
            mean, count = (mean * count + before * more) / (count + more), count + more
        pools.append((mean, count))
    return [mean for mean, count in pools for _ in range(count)]


def _variance(differences: Sequence[float]) -> float:
    """Return the variance of differences about their median, which is the slope of a ramp; outliers are clipped."""
    centre = median(differences) if len(differences) >= TREND_VALUES - 1 else 0.0
    centred = [each - centre for each in differences]
    robust = MAD_TO_SIGMA * median([abs(each) for each in centred])
    bound = CLIP * robust if robust > 0.0 else math.inf
    return max(robust**2, sum(min(each * each, bound * bound) for each in centred) / len(centred))


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


SHIFTS = (0.25, 0.5, 1.0, 2.0)
"""The rises λ that are tested, in standard deviations of the innovations; doubling steps lose little power."""

LARGEST_RESIDUAL = 3.0
"""Residuals count at most this: a single outlier never is enough evidence."""

LIKELIHOOD_DROP = 1.92
"""Half of the 95 % quantile of χ² with one degree of freedom: onsets whose log-likelihood is lower by more are outside
the interval."""


@dataclass(frozen=True, slots=True)
class Onset:
    """The most likely index of the first value of a rise, and the first and last index that are likely too."""

    index: int
    first: int
    last: int


def residuals_above(values: Sequence[float], baseline: float, baseline_values: int, noise: Noise) -> list[float]:
    """Return the standardised prewhitened residuals of `values[1:]` above the baseline; `values[0]` precedes them.

    The standard error of a baseline of m values, 1 / √m standard deviations of the whitened residuals, is subtracted.
    """
    phi, allowance = noise.autocorrelation, 1.0 / math.sqrt(baseline_values)
    return [
        ((values[i] - baseline) - phi * (values[i - 1] - baseline)) / noise.innovation - allowance
        for i in range(1, len(values))
    ]


def log_evidence(residuals: Sequence[float]) -> float:
    """Return log M after the residuals, of a detector that starts with the first one; −inf without residuals."""
    if not residuals:
        return -math.inf
    logs = []
    for shift in SHIFTS:
        total = -math.inf
        for residual in residuals:
            total = _log_plus_one(total) + shift * min(residual, LARGEST_RESIDUAL) - 0.5 * shift**2
        logs.append(total)
    return pooled_evidence(logs)


def _log_plus_one(log: float) -> float:
    """Return log(M + 1) of log M, without overflow."""
    return log + math.log1p(math.exp(-log)) if log > 0.0 else math.log1p(math.exp(log))


def onset_of(residuals: Sequence[float]) -> Onset:
    """Return the most likely onset of a rise that lasts to the last residual, with its 95 % likelihood interval."""
    likelihoods, total = [0.0] * len(residuals), 0.0
    for count, index in enumerate(range(len(residuals) - 1, -1, -1), start=1):
        total += min(residuals[index], LARGEST_RESIDUAL)
        likelihoods[index] = max(total, 0.0) ** 2 / (2.0 * count)
    best = max(likelihoods)
    likely = [index for index, each in enumerate(likelihoods) if each >= best - LIKELIHOOD_DROP]
    return Onset(likelihoods.index(best), likely[0], likely[-1])


Pooling = Literal["mean", "deviation", "median"]

AVERAGE_RUN_LENGTH = 10_000
"""Steps between two false alarms of one rule, at least, in a run whose values are at the threshold all the time: ten
such rules together have at most one in 1,000 steps."""

LARGEST_RATIO = 10.0
"""Multiple of the threshold at which a value is capped: at least five steps in a row are needed, however high."""

MEDIAN_VALUES = 5
"""Newest values whose median is judged: as many as in the definition of a collapse."""

MEDIAN_NOISE = 0.536
"""Standard deviation of the median of five independent normal values, in units of theirs."""

GRID = 2**20
"""Evidence is rounded down to this fraction, so that two histories that differ at one step soon have equal states."""

MEAN_BETS: Final = (0.25, 0.5, 0.75, 0.95)
DEVIATION_BETS: Final = (-2.0, -1.0, -0.5, 0.5, 1.0, 2.0)


def add_evidence(logs: tuple[float, ...], pooling: Pooling, value: float, threshold: float) -> tuple[float, ...]:
    """Return log M of each bet after a value; ``logs`` is empty before the first one."""
    bets: tuple[float, ...] = MEAN_BETS if pooling == "mean" else DEVIATION_BETS
    if pooling == "mean":
        excess = min(max(value / threshold, 0.0), LARGEST_RATIO) - 1.0
        factors = [math.log1p(bet * excess) for bet in bets]
    else:
        factors = [bet * value - 0.5 * bet * bet for bet in bets]
    before = logs or (-math.inf,) * len(bets)
    after = (_log_plus_one(log) + factor for log, factor in zip(before, factors, strict=True))
    return tuple(math.floor(log * GRID) / GRID for log in after)


def pooled_evidence(logs: Sequence[float]) -> float:
    """Return log M, averaged over the bets; −inf before any value."""
    if not logs:
        return -math.inf
    largest = max(logs)
    return largest + math.log(sum(math.exp(each - largest) for each in logs) / len(logs))


TAIL = 0.025
_BISECTIONS = 80


# A table asks for the same few counts again and again.
@lru_cache(maxsize=4096)
def proportion_interval(hits: int, trials: int) -> tuple[float, float]:
    """Return the interval of the probability of a hit; (0, 1) without trials."""
    if trials == 0:
        return 0.0, 1.0
    low = 0.0 if hits == 0 else _solve(lambda p: 1.0 - _binomial(hits - 1, trials, p) - TAIL, 0.0, 1.0)
    high = 1.0 if hits == trials else _solve(lambda p: TAIL - _binomial(hits, trials, p), 0.0, 1.0)
    return low, high


@lru_cache(maxsize=4096)
def poisson_interval(count: int) -> tuple[float, float]:
    """Return the interval of the expected count."""
    most = 2.0 * count + 20.0
    low = 0.0 if count == 0 else _solve(lambda mean: 1.0 - _poisson(count - 1, mean) - TAIL, 0.0, most)
    return low, _solve(lambda mean: TAIL - _poisson(count, mean), 0.0, most)


def _binomial(hits: int, trials: int, probability: float) -> float:
    """Return the probability of at most ``hits`` hits."""
    if probability <= 0.0:
        return 1.0
    if probability >= 1.0:
        return float(hits >= trials)
    log_p, log_q, all_ways = math.log(probability), math.log1p(-probability), math.lgamma(trials + 1)
    return sum(
        math.exp(all_ways - math.lgamma(k + 1) - math.lgamma(trials - k + 1) + k * log_p + (trials - k) * log_q)
        for k in range(hits + 1)
    )


def _poisson(count: int, mean: float) -> float:
    """Return the probability of at most ``count`` events."""
    if mean <= 0.0:
        return 1.0
    return sum(math.exp(k * math.log(mean) - mean - math.lgamma(k + 1)) for k in range(count + 1))


def _solve(rising: Callable[[float], float], low: float, high: float) -> float:
    for _ in range(_BISECTIONS):
        middle = 0.5 * (low + high)
        low, high = (low, middle) if rising(middle) > 0.0 else (middle, high)
    return 0.5 * (low + high)
