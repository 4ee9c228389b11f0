"""A lane of rollouts, one after the other, a chunk of tokens at a time."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from foreshock.measures.passes.compiled import array_layout as layout
from foreshock.measures.passes.compiled.bucket_runs import add_length, add_positions, add_values
from foreshock.measures.passes.compiled.bucket_sums import (
    flush_cells,
    scatter_grids,
    scatter_tails,
    scatter_token_ids,
    scatter_tokens,
)
from foreshock.measures.passes.compiled.chunk_reader import (
    compact,
    compact_whole,
    measured_tokens,
    read_floats,
    read_integers,
    repeat_first,
)
from foreshock.measures.passes.compiled.chunk_sums import (
    bad_updates,
    largest_of_row,
    range_of_row,
    squares_about_means,
    sum_advantages,
    sum_entropies,
    sum_log_probs,
    sum_probabilities,
    sum_ratios,
)
from foreshock.measures.passes.compiled.exponentials import fill_probabilities, fill_ratios
from foreshock.measures.passes.compiled.importance_weights import add_turns, add_weights, close_turn
from foreshock.measures.passes.compiled.jit import compiled, entry
from foreshock.measures.passes.compiled.lane_state import LaneColumns, LaneState, Lookups
from foreshock.measures.passes.compiled.largest_values import cut_largest, keep_largest

__all__ = ["LaneFunction", "VerlLaneFunction", "lane_function", "verl_lane_function"]

LaneFunction = Callable[[LaneColumns, Lookups, LaneState, int, int], int]
VerlLaneFunction = Callable[[LaneColumns, LaneState, int, int], int]


def lane_function(sources: int, *, cached: bool) -> LaneFunction:
    """The compiled function that adds rollouts `first` to `last` to a lane's state.

    It returns `sources`, a digest of all that it is made of. Numba looks for edits only in the file of the function
    that it caches; a number that the function has built in makes it look for machine code of these very sources.
    """

    def sum_lane(columns: LaneColumns, lookups: Lookups, state: LaneState, first: int, last: int) -> int:
        formats, work = columns.formats, state.work
        with_entropy, with_advantage = formats[layout.OF_ENTROPY] != 0, formats[layout.OF_ADVANTAGE] != 0
        for row in range(first, last):
            start, stop = columns.offsets[row], columns.offsets[row + 1]
            for at in range(start, stop, layout.CHUNK):
                n = min(layout.CHUNK, stop - at)
                read_floats(columns.target, formats[layout.OF_TARGET], at, n, work, layout.LOG_TARGET)
                read_floats(columns.behaviour, formats[layout.OF_BEHAVIOUR], at, n, work, layout.LOG_BEHAVIOUR)
                measured = measured_tokens(columns, state, row, at, n)
                if measured == 0:
                    continue
                fill_ratios(work, measured)
                fill_probabilities(work, measured)
                farthest = add_to_rollout(columns, state, row, at, n, measured)
                add_runs_of_chunk(columns, lookups, state, row, at, n, measured, farthest)
                scatter_tokens(lookups, state, measured, with_entropy)
                scatter_grids(state, measured, with_advantage)
                if farthest > layout.FIRST_LEVEL:
                    scatter_tails(lookups, state, measured, with_advantage)
                if formats[layout.OF_TOKEN_IDS] != 0:
                    read_whole(columns.token_ids, formats[layout.OF_TOKEN_IDS], state, layout.TOKEN_ID, at, n, measured)
                    scatter_token_ids(state, measured)
                state.rollout_counts[row, layout.TOKENS] += measured
                state.counts[layout.CHUNKS_WAITING] += 1
                if state.counts[layout.CHUNKS_WAITING] == layout.CHUNKS_BETWEEN_FLUSHES:
                    flush_cells(state)
            if state.rollout_counts[row, layout.TOKENS] > 0:
                add_length(lookups, state, row)
                if formats[layout.OF_TURN] != 0:
                    close_turn(state)
        flush_cells(state)
        cut_largest(state, 0)
        cut_largest(state, 1)
        return sources

    return entry(sum_lane, cached=cached)


def verl_lane_function(sources: int, *, cached: bool) -> VerlLaneFunction:
    """The compiled function that fills `sums` and `rollout_counts` of rollouts `first` to `last` with what d and the
    log-probs give; the rest of the state stays as it is. It returns `sources`.
    """

    def sum_verl_lane(columns: LaneColumns, state: LaneState, first: int, last: int) -> int:
        formats, work, totals = columns.formats, state.work, state.totals
        for row in range(first, last):
            start, stop = columns.offsets[row], columns.offsets[row + 1]
            for at in range(start, stop, layout.CHUNK):
                n = min(layout.CHUNK, stop - at)
                read_floats(columns.target, formats[layout.OF_TARGET], at, n, work, layout.LOG_TARGET)
                read_floats(columns.behaviour, formats[layout.OF_BEHAVIOUR], at, n, work, layout.LOG_BEHAVIOUR)
                measured = measured_tokens(columns, state, row, at, n)
                if measured == 0:
                    continue
                fill_ratios(work, measured)
                sum_ratios(work, measured, totals)
                sum_log_probs(work, measured, totals)
                for index in range(layout.SUMS):
                    state.sums[row, index] += totals[index]
                state.rollout_counts[row, layout.TOKENS] += measured
        return sources

    return entry(sum_verl_lane, cached=cached)


@compiled
def read_column(
    column: NDArray[np.uint8], width: int, state: LaneState, row: int, at: int, n: int, measured: int
) -> None:
    read_floats(column, width, at, n, state.work, row)
    if measured < n:
        compact(state.work, row, state.whole, measured)


@compiled
def read_whole(
    column: NDArray[np.uint8], width: int, state: LaneState, row: int, at: int, n: int, measured: int
) -> None:
    read_integers(column, width, at, n, state.whole, row)
    if measured < n:
        compact_whole(state.whole, row, measured)


@compiled
def add_to_rollout(columns: LaneColumns, state: LaneState, row: int, at: int, n: int, measured: int) -> float:
    """The sums and extremes of a rollout of its own; the chunk's sums stay in `totals`, its largest |d| is returned."""
    work, totals, formats = state.work, state.totals, columns.formats
    sum_ratios(work, measured, totals)
    sum_log_probs(work, measured, totals)
    sum_probabilities(work, measured, totals)
    add_moments(state, row, measured)
    if formats[layout.OF_ENTROPY] != 0:
        read_column(columns.entropy, formats[layout.OF_ENTROPY], state, layout.ENTROPY, at, n, measured)
        state.rollout_counts[row, layout.ENTROPY_TOKENS] += sum_entropies(work, measured, totals)
    if formats[layout.OF_ADVANTAGE] != 0:
        if formats[layout.ADVANTAGE_OF_ROLLOUTS] != 0:
            read_floats(columns.advantage, formats[layout.OF_ADVANTAGE], row, 1, work, layout.ADVANTAGE)
            repeat_first(work, layout.ADVANTAGE, measured)
        else:
            read_column(columns.advantage, formats[layout.OF_ADVANTAGE], state, layout.ADVANTAGE, at, n, measured)
        state.rollout_counts[row, layout.ADVANTAGE_TOKENS] += sum_advantages(work, measured, totals)
        state.counts[layout.BAD_UPDATES] += bad_updates(work, measured)
    for index in range(layout.SUMS):
        state.sums[row, index] += totals[index]
    difference = largest_of_row(work, layout.DIFFERENCE, measured)
    state.largest_difference[0] = max(state.largest_difference[0], difference)
    least, most = range_of_row(work, layout.D, measured)
    state.ranges[row, 0] = min(state.ranges[row, 0], least)
    state.ranges[row, 1] = max(state.ranges[row, 1], most)
    add_weights(state, measured, most)
    keep_largest(state, measured, 0, -least)
    keep_largest(state, measured, 1, most)
    return max(-least, most)


@compiled
def add_moments(state: LaneState, row: int, n: int) -> None:
    """Second moments about the rollout's own means: those about the chunk's, and what lies between the two
    (Chan, Golub and LeVeque 1979).
    """
    totals, means = state.totals, state.rollout
    before = float(state.rollout_counts[row, layout.TOKENS])
    target, behaviour = totals[layout.SUM_TARGET] / n, totals[layout.SUM_BEHAVIOUR] / n
    difference = totals[layout.SUM_DIFFERENCE] / n
    of_target, of_behaviour, of_both, of_difference = squares_about_means(state.work, n, target, behaviour, difference)
    if before > 0.0:
        between, share = before * n / (before + n), n / (before + n)
        step_target, step_behaviour = target - means[layout.MEAN_TARGET], behaviour - means[layout.MEAN_BEHAVIOUR]
        step_difference = difference - means[layout.MEAN_DIFFERENCE]
        of_target += step_target * step_target * between
        of_behaviour += step_behaviour * step_behaviour * between
        of_both += step_target * step_behaviour * between
        of_difference += step_difference * step_difference * between
        target = means[layout.MEAN_TARGET] + step_target * share
        behaviour = means[layout.MEAN_BEHAVIOUR] + step_behaviour * share
        difference = means[layout.MEAN_DIFFERENCE] + step_difference * share
    means[layout.MEAN_TARGET], means[layout.MEAN_BEHAVIOUR] = target, behaviour
    means[layout.MEAN_DIFFERENCE] = difference
    totals[layout.WITHIN_TARGET], totals[layout.WITHIN_BEHAVIOUR] = of_target, of_behaviour
    totals[layout.WITHIN_PRODUCT], totals[layout.WITHIN_DIFFERENCE] = of_both, of_difference


@compiled
def add_runs_of_chunk(
    columns: LaneColumns, lookups: Lookups, state: LaneState, row: int, at: int, n: int, measured: int, farthest: float
) -> None:
    """The maps by place, turn and lag, and the weights of turns."""
    formats = columns.formats
    add_positions(state, at - columns.offsets[row], n, measured, farthest)
    if formats[layout.OF_TURN] != 0:
        read_whole(columns.turn, formats[layout.OF_TURN], state, layout.TURN, at, n, measured)
        add_values(state, layout.TURN, lookups.turn, layout.TURN_CELLS, measured, farthest)
        add_turns(state, row, measured, state.rollout_counts[row, layout.TOKENS])
    if formats[layout.OF_LAG] != 0:
        read_whole(columns.lag, formats[layout.OF_LAG], state, layout.LAG, at, n, measured)
        add_values(state, layout.LAG, lookups.lag, layout.LAG_CELLS, measured, farthest)
