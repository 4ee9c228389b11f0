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

_NEWEST_VALUES = 256
"""The values whose bounds are looked at if all before them are healthy."""

_FORGOTTEN = 18.0
"""A difference of log M that has shrunk by exp(−18) is below the grid, with something to spare."""


def evidence_over(
    logs: tuple[float, ...], pooling: Pooling, values: Floats, thresholds: Floats, beyond: Flags
) -> tuple[float, ...] | None:
    """Return what `add_evidence` returns after all these values, None if it may be enough at a value that is `beyond`.

    Shapes [N], N ≥ 1; `thresholds` are those of "mean".
    """
    before = np.array(logs or (-np.inf,) * len(bets_of(pooling)))
    first = len(values) - _NEWEST_VALUES
    if pooling == "mean" and first > 0 and not beyond[:first].any() and np.all(values[:first] <= thresholds[:first]):
        # Each of these factors is at most 1, so that M has grown by at most 1 a value.
        before = np.logaddexp(before, math.log(first))
    else:
        first = 0
    with np.errstate(over="ignore", invalid="ignore"):
        bounds = _bounds(before, pooling, values[first:], thresholds[first:])
    if bounds is None:
        return None
    pooled = np.logaddexp.reduce(bounds[:, beyond[first:]], axis=0) - math.log(len(bounds))
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
    # A value makes a difference of log M smaller by the factor M / (1 + M) of the M before it, or more.
    shrunk = np.cumsum(np.logaddexp(0.0, -bounds[:, : -_NEWEST_VALUES - 1 : -1]), axis=1)
    found: list[float] = []
    for bet, log, lost, high in zip(bets_of(pooling), logs or (-math.inf,) * len(bounds), shrunk, bounds, strict=True):

        def factors(count: int, bet: float = bet) -> list[float]:
            newest = zip(values[-count:].tolist(), thresholds[-count:].tolist(), strict=True)
            return [log_factor(pooling, bet, value, threshold) for value, threshold in newest]

        count = int(np.searchsorted(lost, _FORGOTTEN)) + 2
        last = _from_newest(factors, count, high)
        if last is None:
            for factor in factors(len(values)):
                log = added_log(log, factor)
            last = log
        found.append(last)
    return tuple(found)


def _from_newest(factors: Callable[[int], list[float]], count: int, bounds: Floats) -> float | None:
    """Return log M of a bet after its last value from the newest `count` of them, or from more if these do not tell.

    `factors` returns the log factors of so many newest values. `bounds` are from above, of log M after each of the
    newest values. None: they do not tell.
    """
    while count < len(bounds):
        low, high = -math.inf, math.ceil(float(bounds[-count - 1]) * GRID) / GRID
        for factor in factors(count):
            are_equal = low == high
            low = added_log(low, factor)
            high = low if are_equal else added_log(high, factor)
        if low == high:
            return low
        count *= 2
    return None
