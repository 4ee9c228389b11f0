"""Sums by bucket: tokens are scattered to cells, plain sums that are now and then added to compensated ones."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from foreshock.measures.passes.compiled import array_layout as layout
from foreshock.measures.passes.compiled.chunk_reader import is_finite
from foreshock.measures.passes.compiled.intrinsics import add_four, bits_of, fetch_row
from foreshock.measures.passes.compiled.jit import compiled, exactly
from foreshock.measures.passes.compiled.lane_state import LaneState, Lookups

__all__ = ["add_run", "flush_cells", "scatter_grids", "scatter_tails", "scatter_token_ids", "scatter_tokens"]

Float64 = NDArray[np.float64]
Int64 = NDArray[np.int64]

# How many tokens before its turn the row of a token's id is asked for: about as long as main memory takes.
_AHEAD = 24


@exactly
def flush_cells(state: LaneState) -> None:
    """Add the plain sums to the pairs (high, low) whose unrounded sum they are, and begin anew."""
    high, low = state.cells_high.reshape(-1), state.cells_low.reshape(-1)
    even, odd = state.cells[: layout.CELLS].reshape(-1), state.cells[layout.CELLS :].reshape(-1)
    for i in range(high.size):
        value, before = even[i] + odd[i], high[i]
        total = before + value
        of_value = total - before
        lost = (before - (total - of_value)) + (value - of_value)
        high[i] = total
        # An infinite sum stays infinite, and never becomes NaN.
        low[i] += lost if lost - lost == 0.0 else 0.0
    state.cells[:] = 0.0
    state.counts[layout.CHUNKS_WAITING] = 0


@compiled
def add_run(
    state: LaneState, cell: int, tokens: int, abs_d: float, d: float, k3: float, difference: float, largest: float
) -> None:
    """Add the sums over tokens of one bucket, in the order of BUCKET_SUMS."""
    add_four(state.cells, cell, abs_d, d, k3, difference)
    state.cell_tokens[cell] += tokens
    state.cell_largest[cell] = max(state.cell_largest[cell], largest)


@compiled
def fill_cells(state: LaneState, row: int, edges: Float64, first_cell: int, n: int) -> None:
    """The cell of each value of a row: how many of the edges are no larger. All are compared, eight at a time, without
    a branch or a lookup, in vectors.
    """
    work, whole = state.work, state.whole
    for i in range(n):
        whole[layout.CELL, i] = first_cell
    for at in range(0, edges.size, 8):
        e0, e1, e2, e3 = edges[at], edges[at + 1], edges[at + 2], edges[at + 3]
        e4, e5, e6, e7 = edges[at + 4], edges[at + 5], edges[at + 6], edges[at + 7]
        for i in range(n):
            x = work[row, i]
            first = (x >= e0) + (x >= e1) + (x >= e2) + (x >= e3)
            second = (x >= e4) + (x >= e5) + (x >= e6) + (x >= e7)
            whole[layout.CELL, i] += first + second


@compiled
def drop_unknown(state: LaneState, row: int, n: int) -> None:
    """Tokens whose value is not finite belong nowhere."""
    work, whole = state.work, state.whole
    for i in range(n):
        cell = whole[layout.CELL, i]
        whole[layout.CELL, i] = cell if is_finite(work[row, i]) else layout.NOWHERE


@compiled
def scatter_row(state: LaneState, row: int, n: int) -> None:
    """Add each token to the cell that is named in a row, in the order of BUCKET_SUMS.

    Most tokens fall into one cell, which must be written before it is read again: every second token has another.
    """
    work, whole, cells = state.work, state.whole, state.cells
    tokens, largest = state.cell_tokens, state.cell_largest
    for i in range(n):
        cell = whole[row, i] + (i & 1) * layout.CELLS
        abs_d = work[layout.ABS_D, i]
        add_four(cells, cell, abs_d, work[layout.D, i], work[layout.K3, i], work[layout.DIFFERENCE, i])
        tokens[cell] += 1
        if abs_d > largest[cell]:
            largest[cell] = abs_d


@compiled
def scatter_tokens(lookups: Lookups, state: LaneState, n: int, with_entropy: bool) -> None:
    """The maps by probability under μ and by entropy, both of which change with every token."""
    fill_cells(state, layout.LOG_BEHAVIOUR, lookups.log_probability, layout.PROBABILITY_CELLS, n)
    scatter_row(state, layout.CELL, n)
    if with_entropy:
        fill_cells(state, layout.ENTROPY, lookups.entropy, layout.ENTROPY_CELLS, n)
        drop_unknown(state, layout.ENTROPY, n)
        scatter_row(state, layout.CELL, n)


@compiled
def fill_bins(state: LaneState, n: int) -> None:
    """Each token's bin in the histogram and its cell on the coarser grid, from the bits of |d|."""
    work, whole = state.work, state.whole
    for i in range(n):
        bits = bits_of(work[layout.ABS_D, i])
        positive = work[layout.D, i] > 0.0
        fine = (bits >> (52 - layout.FINE_BITS)) - layout.FINE_FIRST
        fine = fine if fine > 0 else 0
        fine = fine if fine < layout.FINE_SIZE - 1 else layout.FINE_SIZE - 1
        fine = fine + layout.FINE_SIZE if positive else fine
        whole[layout.FINE, i] = 2 * layout.FINE_SIZE if bits == 0 else fine
        coarse = (bits >> (52 - layout.COARSE_BITS)) - layout.COARSE_FIRST
        coarse = coarse if coarse > 0 else 0
        coarse = coarse if coarse < layout.COARSE_SIZE - 1 else layout.COARSE_SIZE - 1
        whole[layout.CELL, i] = coarse + layout.COARSE_SIZE if positive else coarse


@compiled
def scatter_grids(state: LaneState, n: int, with_advantage: bool) -> None:
    """The histogram of |d|, and the weights' sums on the coarser grid, in the order of TAIL_SUMS."""
    fill_bins(state, n)
    work, whole, histogram, cells = state.work, state.whole, state.histogram, state.cells
    if with_advantage:
        for i in range(n):
            histogram[whole[layout.FINE, i]] += 1
            above = work[layout.ABOVE, i]
            add_four(
                cells,
                whole[layout.CELL, i] + (i & 1) * layout.CELLS,
                above,
                above * above,
                work[layout.ADVANTAGE, i],
                work[layout.SKEW, i],
            )
    else:
        for i in range(n):
            histogram[whole[layout.FINE, i]] += 1
            above = work[layout.ABOVE, i]
            cell = whole[layout.CELL, i] + (i & 1) * layout.CELLS
            cells[cell, 0] += above
            cells[cell, 1] += above * above


@compiled
def scatter_tails(lookups: Lookups, state: LaneState, n: int, with_advantage: bool) -> None:
    """The tokens beyond the first level, each to the cell of the last level that it lies beyond."""
    work, levels = state.work, lookups.levels
    for i in range(n):
        abs_d = work[layout.ABS_D, i]
        if abs_d <= layout.FIRST_LEVEL:
            continue
        beyond = 0
        while beyond + 1 < layout.LEVELS and abs_d > levels[beyond + 1]:
            beyond += 1
        cell = layout.TAIL_CELLS + beyond + (layout.LEVELS if work[layout.D, i] > 0.0 else 0)
        above = work[layout.ABOVE, i]
        advantage = work[layout.ADVANTAGE, i] if with_advantage else 0.0
        skew = work[layout.SKEW, i] if with_advantage else 0.0
        add_four(state.cells, cell, above, above * above, advantage, skew)
        state.cell_tokens[cell] += 1


@compiled
def scatter_token_ids(state: LaneState, n: int) -> None:
    """The tokens of each id, and their sums in the order of TOKEN_ID_SUMS."""
    work, table, ids = state.work, state.token_ids, state.whole[layout.TOKEN_ID]
    for i in range(n):
        fetch_row(table, ids[min(i + _AHEAD, n - 1)])
        add_four(table, ids[i], 1.0, work[layout.D, i], work[layout.ABS_D, i], work[layout.K3, i])
