"""Evidence pooled over steps, for rules on values that are noisy at one step: e-detectors.

A step of a few prompts says little, and its value may be ten times the one before. Under the hypothesis that all is
well, each factor below has an expectation of at most 1 given the earlier steps. The Shiryaev-Roberts sum over all
possible onsets, ``M_t = (M_{t−1} + 1) · factor_t``, averaged over some bets λ, then has an expectation of at most t at
any stopping time t, so an alarm at M ≥ A comes after at least A steps on average, and within n steps with a probability
of at most n / A (Shin, Ramdas and Rinaldo 2022, "E-detectors"). Nothing is assumed about the distribution's shape.

- "mean": values X ≥ 0 whose mean is at most the threshold m have the factor ``1 + λ (min(X / m, c) − 1)``, 0 < λ < 1
  (testing by betting: Waudby-Smith and Ramdas 2024). The cap c only lowers it; with it, no single step is an alarm.
- "deviation": standardised values z of mean 0 whose tails are at most those of a normal distribution have the factor
  ``exp(λ z − λ² / 2)``, for λ of either sign.

- "median" has no evidence of all steps: it is the median of the newest five values, for quantities that fall and rise
  again within a few steps, such as the effective sample size of rollouts that lag. A mean would be one bad step.
"""

from __future__ import annotations

import math
from typing import Final, Literal

Pooling = Literal["mean", "deviation", "median"]

AVERAGE_RUN_LENGTH = 10_000
"""Steps between two false alarms of one rule, at least, in a run whose values are at the threshold all the time: ten
such rules together have at most one in 1,000 steps."""

LARGEST_RATIO = 10.0
"""A value counts as at most so many thresholds: five steps in a row are needed, however high they are."""

MEDIAN_VALUES = 5
"""The newest values whose median is judged: as many as the definition of a collapse looks at."""

MEDIAN_NOISE = 0.536
"""Standard deviation of the median of five independent normal values, in units of theirs."""

GRID = 2**20
"""Evidence is rounded down to this fraction, so that two histories that differ at one step soon have equal states."""

MEAN_BETS: Final = (0.25, 0.5, 0.75, 0.95)
DEVIATION_BETS: Final = (-2.0, -1.0, -0.5, 0.5, 1.0, 2.0)


def add_evidence(logs: tuple[float, ...], pooling: Pooling, value: float, threshold: float) -> tuple[float, ...]:
    """Return log M of each bet after a value; ``logs`` is empty before the first one."""
    return added_evidence(logs, log_factors(pooling, value, threshold))


def bets_of(pooling: Pooling) -> tuple[float, ...]:
    """Return the bets λ whose evidence is averaged."""
    return MEAN_BETS if pooling == "mean" else DEVIATION_BETS


def log_factors(pooling: Pooling, value: float, threshold: float) -> list[float]:
    """Return the logarithm of each bet's factor."""
    return [log_factor(pooling, bet, value, threshold) for bet in bets_of(pooling)]


def log_factor(pooling: Pooling, bet: float, value: float, threshold: float) -> float:
    """Return the logarithm of the factor of one bet."""
    if pooling == "mean":
        return math.log1p(bet * (min(max(value / threshold, 0.0), LARGEST_RATIO) - 1.0))
    return bet * value - 0.5 * bet * bet


def added_evidence(logs: tuple[float, ...], factors: list[float]) -> tuple[float, ...]:
    """Return log M of each bet after a value with these factors."""
    before = logs or (-math.inf,) * len(factors)
    return tuple(added_log(log, factor) for log, factor in zip(before, factors, strict=True))


def added_log(log: float, factor: float) -> float:
    """Return log M of one bet after a value with this factor; it never falls if `log`, of the grid, is higher."""
    plus_one = log + math.log1p(math.exp(-log)) if log > 0.0 else math.log1p(math.exp(log))
    return math.floor((plus_one + factor) * GRID) / GRID


def log_evidence(logs: tuple[float, ...]) -> float:
    """Return log M, averaged over the bets; −inf before any value."""
    if not logs:
        return -math.inf
    largest = max(logs)
    return largest + math.log(sum(math.exp(each - largest) for each in logs) / len(logs))
