"""Tables of sums by token id, one a lane, and what they add up to."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from foreshock.measures.passes.compiled.jit import entry, exactly

__all__ = ["MergeFunction", "merge_function"]

Float64 = NDArray[np.float64]
Int64 = NDArray[np.int64]

MergeFunction = Callable[[Float64, Int64, Int64, Float64, Float64], int]


def merge_function(sources: int, *, cached: bool) -> MergeFunction:
    """The compiled function that adds the tables [L, V, 4] of all lanes, in order, with compensation.

    It fills `ids` [V], rising, `tokens` [V], `high` and `low` [V, 3] from the front, and returns how many it filled.
    """

    def merge_tables(tables: Float64, ids: Int64, tokens: Int64, high: Float64, low: Float64) -> int:
        # Built in so that machine code of other sources is not taken from numba's cache.
        assert sources != 0
        return add_tables(tables, ids, tokens, high, low)

    return entry(merge_tables, cached=cached)


@exactly
def add_tables(tables: Float64, ids: Int64, tokens: Int64, high: Float64, low: Float64) -> int:
    found = 0
    for token_id in range(tables.shape[1]):
        count = 0
        for lane in range(tables.shape[0]):
            count += int(tables[lane, token_id, 0])
        if count == 0:
            continue
        ids[found], tokens[found] = token_id, count
        for column in range(3):
            total, lost = 0.0, 0.0
            for lane in range(tables.shape[0]):
                value = tables[lane, token_id, column + 1]
                longer = total + value
                of_value = longer - total
                error = (total - (longer - of_value)) + (value - of_value)
                lost += error if error - error == 0.0 else 0.0
                total = longer
            high[found, column], low[found, column] = total, lost
        found += 1
    return found
