"""Sums by bucket of values that rarely change between tokens: position, turn and lag; and by response length.

Tokens are summed over runs that share a bucket. A run is mostly a whole chunk, whose sums are known already.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from foreshock.measures.passes.compiled import array_layout as layout
from foreshock.measures.passes.compiled.bucket_sums import add_run
from foreshock.measures.passes.compiled.intrinsics import bits_of, larger
from foreshock.measures.passes.compiled.jit import compiled, reduction
from foreshock.measures.passes.compiled.lane_state import LaneState, Lookups

__all__ = ["add_length", "add_positions", "add_values", "all_equal", "sum_of_run"]

Float64 = NDArray[np.float64]
Int64 = NDArray[np.int64]


@reduction
def sum_of_run(work: Float64, row: int, begin: int, end: int) -> float:
    """Return the sum of row `row` over the tokens begin ≤ i < end of the chunk."""
    values = work[row, begin:end]
    total = 0.0
    for i in range(values.size):
        total += values[i]
    return total


@compiled
def largest_of_run(work: Float64, row: int, begin: int, end: int) -> float:
    """Return the largest |d| of the tokens begin ≤ i < end; |d| is never NaN."""
    values = work[row, begin:end]
    most: float = values[0]
    for i in range(values.size):
        most = larger(values[i], most)
    return most


@compiled
def bucket_of(edges: Float64, value: int) -> int:
    """Return the number of edges that are no larger than the value."""
    bucket = 0
    while bucket < edges.size and value >= edges[bucket]:
        bucket += 1
    return bucket


@compiled
def position_bucket(position: int) -> int:
    """Return the bucket of a position: the exponent of the power of two at or below position + 1."""
    power = (bits_of(float(position + 1)) >> 52) - 1023
    return min(power, layout.POSITIONS - 1)


@compiled
def all_equal(integers: Int64, row: int, n: int) -> bool:
    """Return True if the first n values of a row are equal."""
    first, others = integers[row, 0], 0
    for i in range(n):
        others += 1 if integers[row, i] != first else 0
    return others == 0


@compiled
def add_chunk_to_bucket(state: LaneState, bucket: int, n: int, max_abs_d: float) -> None:
    """Add all n tokens of the chunk to one bucket; `max_abs_d` is their largest |d|."""
    totals = state.totals
    add_run(
        state,
        bucket,
        n,
        totals[layout.SUM_ABS_D],
        totals[layout.SUM_D],
        totals[layout.SUM_K3],
        totals[layout.SUM_DIFFERENCE],
        max_abs_d,
    )


@compiled
def add_runs(state: LaneState, n: int) -> None:
    """Add n tokens, run by run, to the buckets named in row BUCKET."""
    work, buckets = state.work, state.integers[layout.BUCKET]
    begin = 0
    while begin < n:
        end = begin + 1
        while end < n and buckets[end] == buckets[begin]:
            end += 1
        add_run(
            state,
            buckets[begin],
            end - begin,
            sum_of_run(work, layout.ABS_D, begin, end),
            sum_of_run(work, layout.D, begin, end),
            sum_of_run(work, layout.K3, begin, end),
            sum_of_run(work, layout.DIFFERENCE, begin, end),
            largest_of_run(work, layout.ABS_D, begin, end),
        )
        begin = end


@compiled
def add_positions(state: LaneState, first: int, n: int, measured: int, max_abs_d: float) -> None:
    """Add the `measured` of a chunk's n tokens by position; `first` is the position of the chunk's first token."""
    integers, dense = state.integers, measured == n
    begin = position_bucket(first if dense else first + integers[layout.KEPT, 0])
    end = position_bucket(first + n - 1 if dense else first + integers[layout.KEPT, measured - 1])
    if begin == end:
        add_chunk_to_bucket(state, layout.POSITION_BUCKETS + begin, measured, max_abs_d)
        return
    for i in range(measured):
        position = first + (i if dense else integers[layout.KEPT, i])
        integers[layout.BUCKET, i] = layout.POSITION_BUCKETS + position_bucket(position)
    add_runs(state, measured)


@compiled
def add_values(state: LaneState, row: int, edges: Float64, first_bucket: int, n: int, max_abs_d: float) -> None:
    """Add n tokens by the integers of `row`, such as turns or lags."""
    integers = state.integers
    bucket = first_bucket + bucket_of(edges, integers[row, 0])
    if all_equal(integers, row, n):
        add_chunk_to_bucket(state, bucket, n, max_abs_d)
        return
    integers[layout.BUCKET, 0] = bucket
    for i in range(1, n):
        if integers[row, i] != integers[row, i - 1]:
            bucket = first_bucket + bucket_of(edges, integers[row, i])
        integers[layout.BUCKET, i] = bucket
    add_runs(state, n)


@compiled
def add_length(lookups: Lookups, state: LaneState, row: int) -> None:
    """Add a whole rollout by the number of its generated tokens."""
    sums, counts = state.sums, state.rollout_counts
    add_run(
        state,
        layout.LENGTH_BUCKETS + bucket_of(lookups.length, counts[row, layout.GENERATED]),
        counts[row, layout.TOKENS],
        sums[row, layout.SUM_ABS_D],
        sums[row, layout.SUM_D],
        sums[row, layout.SUM_K3],
        sums[row, layout.SUM_DIFFERENCE],
        max(-state.ranges[row, 0], state.ranges[row, 1]),
    )
