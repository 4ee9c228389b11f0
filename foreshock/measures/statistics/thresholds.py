"""Where d = log π − log μ is cut: the signed tails that measures and corrections are made of.

A decision about a token is always taken on d itself, which is a float64 subtraction and the same on every machine,
never on ρ = exp(d), whose last digit depends on who computes it. A token lies above a level where d > level and below
it where d < −level.
"""

from __future__ import annotations

import math

__all__ = ["ABOVE", "BELOW", "TAIL_ASYMMETRY_LEVELS", "TAIL_LEVELS", "TAIL_SUMS", "TAIL_THRESHOLDS", "level_index"]

# In nats, rising. ln 2, ln 5 and ln 10 are the ratios that F(τ), TIS, MIS and IcePop cut at; ln 1e4 is the veto's.
TAIL_LEVELS: tuple[float, ...] = (math.log(2), 1.0, math.log(5), math.log(10), 3.0, math.log(1e4), 10.0)

# The sides of an array of tails.
BELOW, ABOVE = 0, 1

# What is summed over the tokens of a tail, beside their number; A is the advantage, 0 where none was logged.
TAIL_SUMS: tuple[str, ...] = ("ratio_minus_one", "chi2_token", "advantage", "advantage_ratio_minus_one")

# The measures of both tails together, as ratios max(ρ, 1/ρ): `tail(2)` is R3's F(2).
TAIL_THRESHOLDS = (2, 5, 10)

# The measures of each tail by itself, in nats: the column's name of each level.
TAIL_ASYMMETRY_LEVELS: dict[str, float] = {"ln2": math.log(2), "ln5": math.log(5), "1": 1.0, "3": 3.0, "10": 10.0}


def level_index(level: float) -> int:
    """Where a level stands in TAIL_LEVELS; raises ValueError for one that is not kept."""
    return TAIL_LEVELS.index(level)
