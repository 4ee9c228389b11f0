"""Sums by bucket of values that change with every token: plain sums, flushed into compensated sums."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from foreshock.measures.passes.compiled import array_layout as layout
from foreshock.measures.passes.compiled.chunk_reader import is_finite
from foreshock.measures.passes.compiled.intrinsics import add_four, bits_of, prefetch_row
from foreshock.measures.passes.compiled.jit import compiled, exactly
from foreshock.measures.passes.compiled.lane_state import LaneState, Lookups

__all__ = ["add_run", "flush_buckets", "scatter_grids", "scatter_tails", "scatter_token_ids", "scatter_tokens"]

Float64 = NDArray[np.float64]
Int64 = NDArray[np.int64]

# Prefetch distance in tokens; about one DRAM latency.
_PREFETCH_TOKENS = 24


@exactly
def flush_buckets(state: LaneState) -> None:
    """Add the plain bucket sums to their compensated pairs (high, low), and reset them to 0."""
    high, low = state.bucket_sums_high.reshape(-1), state.bucket_sums_low.reshape(-1)
    even, odd = state.bucket_sums[: layout.BUCKETS].reshape(-1), state.bucket_sums[layout.BUCKETS :].reshape(-1)
    for i in range(high.size):
        value, before = even[i] + odd[i], high[i]
        total = before + value
        of_value = total - before
        lost = (before - (total - of_value)) + (value - of_value)
        high[i] = total
        # Keeps an infinite sum infinite: the low part of one would be NaN.
        low[i] += lost if lost - lost == 0.0 else 0.0
    state.bucket_sums[:] = 0.0
    state.counts[layout.CHUNKS_UNFLUSHED] = 0


@compiled
def add_run(
    state: LaneState, bucket: int, tokens: int, abs_d: float, d: float, k3: float, difference: float, largest: float
) -> None:
    """Add the sums over a run of tokens to one bucket, in the order of BUCKET_SUMS."""
    add_four(state.bucket_sums, bucket, abs_d, d, k3, difference)
    state.bucket_tokens[bucket] += tokens
    state.bucket_max_abs_d[bucket] = max(state.bucket_max_abs_d[bucket], largest)


@compiled
def fill_buckets(state: LaneState, row: int, edges: Float64, first_bucket: int, n: int) -> None:
    """Write to row BUCKET the bucket of each value of `row`: `first_bucket` + the number of edges that are no larger.

    Eight edges at a time, without a branch or a lookup, so that the loops are vectorised. `edges` has a multiple of 8.
    """
    work, integers = state.work, state.integers
    for i in range(n):
        integers[layout.BUCKET, i] = first_bucket
    for at in range(0, edges.size, 8):
        e0, e1, e2, e3 = edges[at], edges[at + 1], edges[at + 2], edges[at + 3]
        e4, e5, e6, e7 = edges[at + 4], edges[at + 5], edges[at + 6], edges[at + 7]
        for i in range(n):
            x = work[row, i]
            first = (x >= e0) + (x >= e1) + (x >= e2) + (x >= e3)
            second = (x >= e4) + (x >= e5) + (x >= e6) + (x >= e7)
            integers[layout.BUCKET, i] += first + second


@compiled
def drop_nonfinite(state: LaneState, row: int, n: int) -> None:
    """Assign tokens whose value in `row` is not finite to UNKNOWN_BUCKET."""
    work, integers = state.work, state.integers
    for i in range(n):
        bucket = integers[layout.BUCKET, i]
        integers[layout.BUCKET, i] = bucket if is_finite(work[row, i]) else layout.UNKNOWN_BUCKET


@compiled
def scatter_row(state: LaneState, row: int, n: int) -> None:
    """Add each token to the bucket named in `row`, in the order of BUCKET_SUMS.

    Most tokens fall into one bucket, whose sum must be stored before it is loaded again. Even and odd tokens therefore
    have buckets of their own, which halves the wait.
    """
    work, integers, sums = state.work, state.integers, state.bucket_sums
    tokens, largest = state.bucket_tokens, state.bucket_max_abs_d
    for i in range(n):
        bucket = integers[row, i] + (i & 1) * layout.BUCKETS
        abs_d = work[layout.ABS_D, i]
        add_four(sums, bucket, abs_d, work[layout.D, i], work[layout.K3, i], work[layout.DIFFERENCE, i])
        tokens[bucket] += 1
        if abs_d > largest[bucket]:
            largest[bucket] = abs_d


@compiled
def scatter_tokens(lookups: Lookups, state: LaneState, n: int, with_entropy: bool) -> None:
    """Add n tokens to the buckets by probability under μ and by entropy, both of which change with every token."""
    fill_buckets(state, layout.LOG_BEHAVIOUR, lookups.log_probability, layout.PROBABILITY_BUCKETS, n)
    scatter_row(state, layout.BUCKET, n)
    if with_entropy:
        fill_buckets(state, layout.ENTROPY, lookups.entropy, layout.ENTROPY_BUCKETS, n)
        drop_nonfinite(state, layout.ENTROPY, n)
        scatter_row(state, layout.BUCKET, n)


@compiled
def fill_bins(state: LaneState, n: int) -> None:
    """Write each token's bin in the histogram of |d| to row FINE, and that on WEIGHT_GRID to row BUCKET."""
    work, integers = state.work, state.integers
    for i in range(n):
        bits = bits_of(work[layout.ABS_D, i])
        positive = work[layout.D, i] > 0.0
        fine = (bits >> (52 - layout.FINE_BITS)) - layout.FINE_FIRST
        fine = fine if fine > 0 else 0
        fine = fine if fine < layout.FINE_SIZE - 1 else layout.FINE_SIZE - 1
        fine = fine + layout.FINE_SIZE if positive else fine
        integers[layout.FINE, i] = 2 * layout.FINE_SIZE if bits == 0 else fine
        coarse = (bits >> (52 - layout.COARSE_BITS)) - layout.COARSE_FIRST
        coarse = coarse if coarse > 0 else 0
        coarse = coarse if coarse < layout.COARSE_SIZE - 1 else layout.COARSE_SIZE - 1
        integers[layout.BUCKET, i] = coarse + layout.COARSE_SIZE if positive else coarse


@compiled
def scatter_grids(state: LaneState, n: int, with_advantage: bool) -> None:
    """Add n tokens to the histogram of |d| and to the weight sums on WEIGHT_GRID, in the order of TAIL_SUMS."""
    fill_bins(state, n)
    work, integers, histogram, sums = state.work, state.integers, state.histogram, state.bucket_sums
    if with_advantage:
        for i in range(n):
            histogram[integers[layout.FINE, i]] += 1
            above = work[layout.RATIO_MINUS_ONE, i]
            add_four(
                sums,
                integers[layout.BUCKET, i] + (i & 1) * layout.BUCKETS,
                above,
                above * above,
                work[layout.ADVANTAGE, i],
                work[layout.SKEW, i],
            )
    else:
        for i in range(n):
            histogram[integers[layout.FINE, i]] += 1
            above = work[layout.RATIO_MINUS_ONE, i]
            bucket = integers[layout.BUCKET, i] + (i & 1) * layout.BUCKETS
            sums[bucket, 0] += above
            sums[bucket, 1] += above * above


@compiled
def scatter_tails(lookups: Lookups, state: LaneState, n: int, with_advantage: bool) -> None:
    """Add each token beyond the first tail level to the bucket of the last level that it exceeds."""
    work, levels = state.work, lookups.levels
    for i in range(n):
        abs_d = work[layout.ABS_D, i]
        if abs_d <= layout.FIRST_LEVEL:
            continue
        beyond = 0
        while beyond + 1 < layout.LEVELS and abs_d > levels[beyond + 1]:
            beyond += 1
        bucket = layout.TAIL_BUCKETS + beyond + (layout.LEVELS if work[layout.D, i] > 0.0 else 0)
        above = work[layout.RATIO_MINUS_ONE, i]
        advantage = work[layout.ADVANTAGE, i] if with_advantage else 0.0
        skew = work[layout.SKEW, i] if with_advantage else 0.0
        add_four(state.bucket_sums, bucket, above, above * above, advantage, skew)
        state.bucket_tokens[bucket] += 1


@compiled
def scatter_token_ids(state: LaneState, n: int) -> None:
    """Add n tokens to the table by token id: the number of tokens, then TOKEN_ID_SUMS."""
    work, table, ids = state.work, state.token_ids, state.integers[layout.TOKEN_ID]
    for i in range(n):
        prefetch_row(table, ids[min(i + _PREFETCH_TOKENS, n - 1)])
        add_four(table, ids[i], 1.0, work[layout.D, i], work[layout.ABS_D, i], work[layout.K3, i])
