"""The evidence of pooled rules over a stretch: whether it can be enough anywhere, and what it is after the last value.

Without rounding, M_t = exp(S_t) (M_0 + Σ exp(−S_j)) over j < t, with S the sum of the log factors: a bound from above
for arrays, as rounding is down. The last evidence is found without most of the values, as evidence is forgotten: it is
followed over the newest values from below and from above all that it can be. If both become equal they are it, because
`added_log` keeps the order of any two values of its grid.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from foreshock.early_warning.pooling import (
    AVERAGE_RUN_LENGTH,
    DEVIATION_BETS,
    GRID,
    LARGEST_RATIO,
    MEAN_BETS,
    Pooling,
    added_log,
    bets_of,
    log_factor,
)
from foreshock.early_warning.stretches.columns import Flags, Floats

_MARGIN = 1e-3
"""More than the error of the bounds, which is below 1e-5 for sums up to _LARGEST_SUM and 10,000 values."""

_LARGEST_SUM = 1e6

_FORGOTTEN = 18.0
"""A difference of log M that has shrunk by exp(−18) is below the grid, with something to spare."""


def evidence_over(
    logs: tuple[float, ...], pooling: Pooling, values: Floats, thresholds: Floats, beyond: Flags
) -> tuple[float, ...] | None:
    """Return what `add_evidence` returns after all these values, None if it may be enough at a value that is `beyond`.

    Shapes [N], N ≥ 1; `thresholds` are those of "mean".
    """
    before = np.array(logs or (-np.inf,) * len(bets_of(pooling)))
    with np.errstate(over="ignore", invalid="ignore"):
        bounds = _bounds(before, pooling, values, thresholds)
    if bounds is None:
        return None
    pooled = np.logaddexp.reduce(bounds[:, beyond], axis=0) - math.log(len(bounds))
    if np.any(pooled >= math.log(AVERAGE_RUN_LENGTH)):
        return None
    return _last(logs, pooling, values, thresholds, bounds)


def _bounds(before: Floats, pooling: Pooling, values: Floats, thresholds: Floats) -> Floats | None:
    """Return bounds of log M of each bet after each value, shape [bets, N]; None if they are not precise."""
    if pooling == "mean":
        excess = np.clip(values / thresholds, 0.0, LARGEST_RATIO) - 1.0
        factors = np.log1p(np.multiply.outer(np.array(MEAN_BETS), excess))
    else:
        bets = np.array(DEVIATION_BETS)
        factors = np.multiply.outer(bets, values) - 0.5 * np.square(bets)[:, np.newaxis]
    if not np.abs(factors).sum(axis=1).max() <= _LARGEST_SUM:
        return None
    sums = np.cumsum(factors, axis=1)
    earlier = np.concatenate((before[:, np.newaxis], np.zeros((len(before), 1)), -sums[:, :-1]), axis=1)
    found: Floats = sums + np.logaddexp.accumulate(earlier, axis=1)[:, 1:] + _MARGIN
    return found


def _last(
    logs: tuple[float, ...], pooling: Pooling, values: Floats, thresholds: Floats, bounds: Floats
) -> tuple[float, ...]:
    before = logs or (-math.inf,) * len(bounds)
    # A value makes a difference of log M smaller by the factor M / (1 + M) of the M before it, or more.
    shrunk = np.cumsum(np.logaddexp(0.0, -bounds[:, ::-1]), axis=1)
    found: list[float] = []
    for bet, log, lost, high in zip(bets_of(pooling), before, shrunk, bounds, strict=True):

        def factors(first: int, bet: float = bet) -> list[float]:
            newest = zip(values[first:].tolist(), thresholds[first:].tolist(), strict=True)
            return [log_factor(pooling, bet, value, threshold) for value, threshold in newest]

        found.append(_last_of_bet(log, factors, int(np.searchsorted(lost, _FORGOTTEN)) + 2, high))
    return tuple(found)


def _last_of_bet(log: float, factors: Callable[[int], list[float]], newest: int, bounds: Floats) -> float:
    """Return log M of a bet after N values, N ≥ 1: from the `newest` of them, or from more if these do not tell.

    `factors` returns the log factors from an index on; `bounds` [N] are from above, of log M after each value.
    """
    while newest < len(bounds):
        first = len(bounds) - newest
        low, high = -math.inf, math.ceil(float(bounds[first - 1]) * GRID) / GRID
        for factor in factors(first):
            are_equal = low == high
            low = added_log(low, factor)
            high = low if are_equal else added_log(high, factor)
        if low == high:
            return low
        newest *= 2
    for factor in factors(0):
        log = added_log(log, factor)
    return log
