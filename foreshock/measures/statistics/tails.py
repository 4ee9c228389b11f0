"""Regions of d = log π − log μ, the tails beyond a level, and the largest values of d.

Each side of 0 is cut into regions: at the edges of WEIGHT_GRID, and at TAIL_LEVELS. The sums of importance weights over
the regions give the tails, and the effect of a correction that cuts at an edge.

A token is compared with a level by d itself, a float64 subtraction that is the same on every machine, never by ρ =
exp(d), whose last digit depends on the library. A token is above a level if d > level, and below it if d < −level.
"""

import math

import numpy as np
from numpy.typing import NDArray

from foreshock.measures.statistics.histograms import WEIGHT_GRID

Float64 = NDArray[np.float64]

# In nats, ascending. F(τ), TIS, MIS and IcePop cut at the ratios 2, 5 and 10, the veto at 1e4.
TAIL_LEVELS: tuple[float, ...] = (math.log(2), 1.0, math.log(5), math.log(10), 3.0, math.log(1e4), 10.0)

# The sides of an array of regions: d ≤ 0 and d > 0.
BELOW, ABOVE = 0, 1

# Terms summed over the tokens of a region, beside their number; the advantage is 0 if it was not logged.
TAIL_SUMS: tuple[str, ...] = ("ratio_minus_one", "chi2_token", "advantage", "advantage_ratio_minus_one")

# The measures of both tails together, as ratios max(ρ, 1/ρ): `tail(2)` is R3's F(2).
TAIL_THRESHOLDS = (2, 5, 10)

# The measures of each tail by itself, in nats: the column's name of each level.
TAIL_ASYMMETRY_LEVELS: dict[str, float] = {"ln2": math.log(2), "1": 1.0, "3": 3.0}

# The number of largest d, and of largest −d, kept for the fit of the generalised Pareto distribution.
LARGEST_VALUES = 1024
# Above this k̂ the range of k3 is too short: Student's t with 3 degrees of freedom (k = ⅓) exceeds it in 90 to 100 %
# of batches, with 5 (k = ⅕) in few; see estimators/bootstrap.py.
LARGEST_TAIL_SHAPE = 0.3

_BIN_OF_LEVEL = WEIGHT_GRID.bins(np.array(TAIL_LEVELS))
# A bin of WEIGHT_GRID holds one level at most: the region of a token is FIRST_REGION of its bin, or the next one if
# |d| > LEVEL_OF_BIN.
FIRST_REGION = np.arange(WEIGHT_GRID.size) + np.searchsorted(_BIN_OF_LEVEL, np.arange(WEIGHT_GRID.size))
LEVEL_OF_BIN = np.full(WEIGHT_GRID.size, math.inf)
LEVEL_OF_BIN[_BIN_OF_LEVEL] = TAIL_LEVELS
REGIONS = WEIGHT_GRID.size + len(TAIL_LEVELS)
# The first region beyond each of TAIL_LEVELS.
REGION_BEYOND: tuple[int, ...] = tuple((FIRST_REGION[_BIN_OF_LEVEL] + 1).tolist())


def regions_of(abs_d: Float64) -> NDArray[np.int64]:
    """Return the region of each |d|, from 0 to REGIONS − 1."""
    bins = WEIGHT_GRID.bins(abs_d)
    regions: NDArray[np.int64] = FIRST_REGION[bins] + (abs_d > LEVEL_OF_BIN[bins])
    return regions


def region_beyond(level: float) -> int:
    """Return the first region beyond one of TAIL_LEVELS; raises ValueError for any other level."""
    return REGION_BEYOND[TAIL_LEVELS.index(level)]


def merge_largest(known: Float64, values: Float64, count: int) -> Float64:
    """Return the `count` largest (or all, if fewer) of `known` (descending) and `values` (any order), descending."""
    if known.size >= count:
        values = values[values > known[-1]]
        if values.size == 0:
            return known
    elif values.size > count:
        values = np.partition(values, values.size - count)[-count:]
    return np.sort(np.concatenate([known, values]))[::-1][:count].copy()
