"""Exact 95 % intervals of counts: Clopper and Pearson's of a proportion, Garwood's of a Poisson mean."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

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
