"""The levels at which d = log π − log μ is cut into tails, and the largest values of d.

A token is compared with a level by d itself, a float64 subtraction that is the same on every machine, never by ρ =
exp(d), whose last digit depends on the library. A token is above a level if d > level, and below it if d < −level.
"""

import math

import numpy as np
from numpy.typing import NDArray

from foreshock.measures.statistics.compensated_sums import CompensatedSums

Float64 = NDArray[np.float64]

# In nats, ascending. F(τ), TIS, MIS and IcePop cut at the ratios 2, 5 and 10, the veto at 1e4.
TAIL_LEVELS: tuple[float, ...] = (math.log(2), 1.0, math.log(5), math.log(10), 3.0, math.log(1e4), 10.0)

# The sides of an array of tails.
BELOW, ABOVE = 0, 1

# Terms summed over the tokens of a tail, beside their number; the advantage is 0 if it was not logged.
TAIL_SUMS: tuple[str, ...] = ("ratio_minus_one", "chi2_token", "advantage", "advantage_ratio_minus_one")

# The measures of both tails together, as ratios max(ρ, 1/ρ): `tail(2)` is R3's F(2).
TAIL_THRESHOLDS = (2, 5, 10)

# The measures of each tail by itself, in nats: the column's name of each level.
TAIL_ASYMMETRY_LEVELS: dict[str, float] = {"ln2": math.log(2), "ln5": math.log(5), "1": 1.0, "3": 3.0, "10": 10.0}

# The number of largest d, and of largest −d, kept for the fit of the generalised Pareto distribution.
LARGEST_VALUES = 1024
# Above this k̂ the range of k3 is too short: Student's t with 3 degrees of freedom (k = ⅓) exceeds it in 90 to 100 %
# of batches, with 5 (k = ⅕) in few; see estimators/bootstrap.py.
LARGEST_TAIL_SHAPE = 0.3


def level_index(level: float) -> int:
    """Return the index of a level in TAIL_LEVELS; raises ValueError for any other level."""
    return TAIL_LEVELS.index(level)


def merge_largest(known: Float64, values: Float64, count: int) -> Float64:
    """Return the `count` largest (or all, if fewer) of `known` (descending) and `values` (any order), descending."""
    if known.size >= count:
        values = values[values > known[-1]]
        if values.size == 0:
            return known
    elif values.size > count:
        values = np.partition(values, values.size - count)[-count:]
    return np.sort(np.concatenate([known, values]))[::-1][:count].copy()


def sums_beyond(between: CompensatedSums) -> CompensatedSums:
    """Return the sums beyond each level, [2, levels, K], from those between two levels."""
    total = CompensatedSums.zeros(2, len(TAIL_LEVELS), len(TAIL_SUMS))
    running = CompensatedSums.zeros(2, len(TAIL_SUMS))
    for level in reversed(range(len(TAIL_LEVELS))):
        running = running + CompensatedSums(between.high[:, level], between.low[:, level])
        total.high[:, level], total.low[:, level] = running.high, running.low
    return total
