"""The evidence of pooled rules over a stretch: whether it can be enough anywhere, and what it is after the last value.

Without rounding, M_t = exp(S_t) (M_0 + Σ exp(−S_j)) over j < t, with S the sum of the log factors: a bound from above
for arrays, as rounding is down. The last evidence is found without most of the values, as evidence is forgotten: it is
followed over the newest values from below and from above all that it can be. If both become equal they are it, because
`added_evidence` keeps the order of any two values of its grid.
"""

from __future__ import annotations

import math

import numpy as np

from foreshock.early_warning.pooling import (
    AVERAGE_RUN_LENGTH,
    DEVIATION_BETS,
    GRID,
    LARGEST_RATIO,
    MEAN_BETS,
    Pooling,
    add_evidence,
    added_evidence,
    log_factors,
)
from foreshock.early_warning.stretches.columns import Flags, Floats

_MARGIN = 1e-3
"""More than the error of the bounds, which is below 1e-5 for sums up to _LARGEST_SUM and 10,000 values."""

_LARGEST_SUM = 1e6

_NEWEST_VALUES = 96
"""Values after which the evidence of a healthy run rarely depends on what came before them."""


def evidence_over(
    logs: tuple[float, ...], pooling: Pooling, values: Floats, thresholds: Floats, beyond: Flags
) -> tuple[float, ...] | None:
    """Return what `add_evidence` returns after all these values, None if it may be enough at a value that is `beyond`.

    Shapes [N], N ≥ 1; `thresholds` are those of "mean".
    """
    before = np.array(logs or (-np.inf,) * len(MEAN_BETS if pooling == "mean" else DEVIATION_BETS))
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
    count = _NEWEST_VALUES
    while count < len(values):
        first = len(values) - count
        low: tuple[float, ...] = (-math.inf,) * len(bounds)
        high: tuple[float, ...] | None = tuple((np.ceil(bounds[:, first - 1] * GRID) / GRID).tolist())
        for value, threshold in zip(values[first:].tolist(), thresholds[first:].tolist(), strict=True):
            factors = log_factors(pooling, value, threshold)
            low = added_evidence(low, factors)
            if high is not None:
                high = added_evidence(high, factors)
                if low == high:
                    high = None
        if high is None:
            return low
        count *= 4
    for value, threshold in zip(values.tolist(), thresholds.tolist(), strict=True):
        logs = add_evidence(logs, pooling, value, threshold)
    return logs
