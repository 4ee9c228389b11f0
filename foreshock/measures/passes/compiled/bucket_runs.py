"""The maps by what hardly changes from a token to the next: place in the response, turn, lag; and by length.

Tokens are added up over runs that share a bucket, which mostly is a whole chunk, whose sums are known already.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from foreshock.measures.passes.compiled import array_layout as layout
from foreshock.measures.passes.compiled.bucket_sums import add_run
from foreshock.measures.passes.compiled.intrinsics import bits_of, larger
from foreshock.measures.passes.compiled.jit import compiled, reduction
from foreshock.measures.passes.compiled.lane_state import LaneState, Lookups

__all__ = ["add_length", "add_positions", "add_values", "is_constant", "sum_of_run"]

Float64 = NDArray[np.float64]
Int64 = NDArray[np.int64]


@reduction
def sum_of_run(work: Float64, row: int, begin: int, end: int) -> float:
    """Σ over the tokens begin ≤ i < end of the chunk."""
    values = work[row, begin:end]
    total = 0.0
    for i in range(values.size):
        total += values[i]
    return total


@compiled
def largest_of_run(work: Float64, row: int, begin: int, end: int) -> float:
    """The largest |d|, which is never NaN, of the tokens begin ≤ i < end."""
    values = work[row, begin:end]
    most: float = values[0]
    for i in range(values.size):
        most = larger(values[i], most)
    return most


@compiled
def bucket_of(edges: Float64, value: int) -> int:
    """How many of the edges are no larger than the value."""
    bucket = 0
    while bucket < edges.size and value >= edges[bucket]:
        bucket += 1
    return bucket


@compiled
def position_bucket(position: int) -> int:
    """The power of two of the place, counted from 1."""
    power = (bits_of(float(position + 1)) >> 52) - 1023
    return min(power, layout.POSITIONS - 1)


@compiled
def is_constant(whole: Int64, row: int, n: int) -> bool:
    first, others = whole[row, 0], 0
    for i in range(n):
        others += 1 if whole[row, i] != first else 0
    return others == 0


@compiled
def add_chunk_to_cell(state: LaneState, cell: int, n: int, farthest: float) -> None:
    """All n tokens of the chunk, the largest of whose |d| is `farthest`, are of one bucket."""
    totals = state.totals
    add_run(
        state,
        cell,
        n,
        totals[layout.SUM_ABS_D],
        totals[layout.SUM_D],
        totals[layout.SUM_K3],
        totals[layout.SUM_DIFFERENCE],
        farthest,
    )


@compiled
def add_runs(state: LaneState, n: int) -> None:
    """Add n tokens to the cells that are named in CELL."""
    work, cells = state.work, state.whole[layout.CELL]
    begin = 0
    while begin < n:
        end = begin + 1
        while end < n and cells[end] == cells[begin]:
            end += 1
        add_run(
            state,
            cells[begin],
            end - begin,
            sum_of_run(work, layout.ABS_D, begin, end),
            sum_of_run(work, layout.D, begin, end),
            sum_of_run(work, layout.K3, begin, end),
            sum_of_run(work, layout.DIFFERENCE, begin, end),
            largest_of_run(work, layout.ABS_D, begin, end),
        )
        begin = end


@compiled
def add_positions(state: LaneState, first: int, n: int, measured: int, farthest: float) -> None:
    """The map by place in the response: `first` is that of the chunk's n tokens, of which some are measured."""
    whole, dense = state.whole, measured == n
    begin = position_bucket(first if dense else first + whole[layout.KEPT, 0])
    end = position_bucket(first + n - 1 if dense else first + whole[layout.KEPT, measured - 1])
    if begin == end:
        add_chunk_to_cell(state, layout.POSITION_CELLS + begin, measured, farthest)
        return
    for i in range(measured):
        position = first + (i if dense else whole[layout.KEPT, i])
        whole[layout.CELL, i] = layout.POSITION_CELLS + position_bucket(position)
    add_runs(state, measured)


@compiled
def add_values(state: LaneState, row: int, edges: Float64, first_cell: int, n: int, farthest: float) -> None:
    """The map by the whole numbers of a row."""
    whole = state.whole
    cell = first_cell + bucket_of(edges, whole[row, 0])
    if is_constant(whole, row, n):
        add_chunk_to_cell(state, cell, n, farthest)
        return
    whole[layout.CELL, 0] = cell
    for i in range(1, n):
        if whole[row, i] != whole[row, i - 1]:
            cell = first_cell + bucket_of(edges, whole[row, i])
        whole[layout.CELL, i] = cell
    add_runs(state, n)


@compiled
def add_length(lookups: Lookups, state: LaneState, row: int) -> None:
    """The map by how many tokens the model generated: a whole rollout at a time."""
    sums, counts = state.sums, state.rollout_counts
    add_run(
        state,
        layout.LENGTH_CELLS + bucket_of(lookups.length, counts[row, layout.GENERATED]),
        counts[row, layout.TOKENS],
        sums[row, layout.SUM_ABS_D],
        sums[row, layout.SUM_D],
        sums[row, layout.SUM_K3],
        sums[row, layout.SUM_DIFFERENCE],
        max(-state.ranges[row, 0], state.ranges[row, 1]),
    )
