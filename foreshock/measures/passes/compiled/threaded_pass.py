"""The compiled pass on several threads: lanes of whole rollouts, of which each thread takes one at a time.

The cuts depend on the batch alone, and lanes are merged in their order, so the result does not depend on the threads.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from foreshock.measures.inputs import TokenInputs
from foreshock.measures.passes.compiled import array_layout as layout
from foreshock.measures.passes.compiled.compilation import compiled_functions
from foreshock.measures.passes.compiled.input_columns import DENSE_ROWS_PER_TOKEN, batch_columns
from foreshock.measures.passes.compiled.lane_state import lookups, new_state
from foreshock.measures.passes.compiled.merge_lanes import fill_rollouts, fill_totals, token_id_sums
from foreshock.measures.statistics.rollout_sums import RolloutSums

__all__ = ["lane_cuts", "run_lanes", "sum_rollouts_in_lanes"]

_LARGEST_LANES = 16
# Smallest lane in tokens; below it the cost of a thread dominates.
_LANE_TOKENS = 1 << 17


def sum_rollouts_in_lanes(inputs: TokenInputs, threads: int | None) -> RolloutSums:
    """Return the sums of each rollout and of all rollouts together; `threads` None: one per processor."""
    functions, batch = compiled_functions(), batch_columns(inputs)
    rollouts = inputs.offsets.size - 1
    if rollouts == 0:
        return RolloutSums.empty(rollouts)
    result = RolloutSums.unfilled(rollouts)
    ranges = np.empty((rollouts, 2))
    ranges[:, 0], ranges[:, 1] = math.inf, -math.inf
    counts = np.zeros((rollouts, layout.ROLLOUT_COUNTS), np.int64)
    cuts = lane_cuts(batch.columns.offsets, batch.table_size).tolist()
    tables = np.zeros((len(cuts) - 1, batch.table_size, layout.ID_COLUMNS))
    states = [new_state(result.sums, ranges, counts, table) for table in tables]
    edges = lookups()

    def add_lane(lane: int) -> None:
        functions.sum_lane(batch.columns, edges, states[lane], cuts[lane], cuts[lane + 1])

    run_lanes(add_lane, len(states), threads)
    fill_rollouts(result, ranges, counts)
    fill_totals(result, states)
    result.token_ids = token_id_sums(tables, batch.ids, functions.merge_tables)
    return result


def run_lanes(add_lane: Callable[[int], None], lanes: int, threads: int | None) -> None:
    """Call `add_lane` for each lane on at most `threads` threads."""
    workers = 1 if lanes == 1 else min(lanes, threads or processors())
    if workers <= 1:
        for lane in range(lanes):
            add_lane(lane)
        return
    with ThreadPoolExecutor(workers) as pool:
        for _ in pool.map(add_lane, range(lanes)):
            pass


def processors() -> int:
    """Return the number of processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def lane_cuts(offsets: NDArray[np.int64], table_size: int) -> NDArray[np.int64]:
    """Return [L + 1] the first rollout of each lane, and the number of rollouts; lanes have about equal tokens."""
    tokens, rollouts = int(offsets[-1]), offsets.size - 1
    lanes = min(max(tokens // _LANE_TOKENS, 1), _LARGEST_LANES)
    while lanes > 1 and lanes * table_size > tokens * DENSE_ROWS_PER_TOKEN:
        lanes //= 2
    if lanes == 1:
        return np.array([0, rollouts] if rollouts else [0])
    shares = np.arange(1, lanes) * (tokens / lanes)
    inner = np.searchsorted(offsets, shares)
    return np.unique(np.concatenate([[0], inner, [rollouts]]))
