"""The entry functions of one lane: a range of rollouts that one thread sums, a chunk of tokens at a time.

`lane_function` computes all sums, `verl_lane_function` only those of verl's thirteen off-policy metrics.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from foreshock.measures.passes.compiled import array_layout as layout
from foreshock.measures.passes.compiled.bucket_runs import add_length, add_positions, add_values
from foreshock.measures.passes.compiled.bucket_sums import (
    flush_buckets,
    scatter_grids,
    scatter_tails,
    scatter_token_ids,
    scatter_tokens,
)
from foreshock.measures.passes.compiled.chunk_reader import (
    compact_floats,
    compact_integers,
    keep_measured,
    read_floats,
    read_integers,
    repeat_first,
)
from foreshock.measures.passes.compiled.chunk_sums import (
    count_bad_updates,
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
    """Return the compiled function that adds rollouts first ≤ row < last to a lane's state.

    It returns `sources`, the digest of everything it is compiled from. Numba's cache only detects edits of the file of
    the cached function; the digest as a built-in constant detects edits of all files.
    """

    def sum_lane(columns: LaneColumns, lookups: Lookups, state: LaneState, first: int, last: int) -> int:
        formats, work = columns.formats, state.work
        with_entropy, with_advantage = formats[layout.ENTROPY_FORMAT] != 0, formats[layout.ADVANTAGE_FORMAT] != 0
        for row in range(first, last):
            start, stop = columns.offsets[row], columns.offsets[row + 1]
            for at in range(start, stop, layout.CHUNK):
                n = min(layout.CHUNK, stop - at)
                read_floats(columns.target, formats[layout.TARGET_FORMAT], at, n, work, layout.LOG_TARGET)
                read_floats(columns.behaviour, formats[layout.BEHAVIOUR_FORMAT], at, n, work, layout.LOG_BEHAVIOUR)
                measured = keep_measured(columns, state, row, at, n)
                if measured == 0:
                    continue
                fill_ratios(work, measured)
                fill_probabilities(work, measured)
                max_abs_d = add_to_rollout(columns, state, row, at, n, measured)
                add_runs_of_chunk(columns, lookups, state, row, at, n, measured, max_abs_d)
                scatter_tokens(lookups, state, measured, with_entropy)
                scatter_grids(state, measured, with_advantage)
                if max_abs_d > layout.FIRST_LEVEL:
                    scatter_tails(lookups, state, measured, with_advantage)
                if formats[layout.TOKEN_IDS_FORMAT] != 0:
                    read_integer_column(
                        columns.token_ids, formats[layout.TOKEN_IDS_FORMAT], state, layout.TOKEN_ID, at, n, measured
                    )
                    scatter_token_ids(state, measured)
                state.rollout_counts[row, layout.TOKENS] += measured
                state.counts[layout.CHUNKS_UNFLUSHED] += 1
                if state.counts[layout.CHUNKS_UNFLUSHED] == layout.CHUNKS_BETWEEN_FLUSHES:
                    flush_buckets(state)
            if state.rollout_counts[row, layout.TOKENS] > 0:
                add_length(lookups, state, row)
                if formats[layout.TURN_FORMAT] != 0:
                    close_turn(state)
        flush_buckets(state)
        cut_largest(state, 0)
        cut_largest(state, 1)
        return sources

    return entry(sum_lane, cached=cached)


def verl_lane_function(sources: int, *, cached: bool) -> VerlLaneFunction:
    """Return the compiled function that sums d and the log-probs of rollouts first ≤ row < last.

    It fills `sums` and `rollout_counts`, leaves the rest of the state unchanged, and returns `sources`.
    """

    def sum_verl_lane(columns: LaneColumns, state: LaneState, first: int, last: int) -> int:
        formats, work, totals = columns.formats, state.work, state.totals
        for row in range(first, last):
            start, stop = columns.offsets[row], columns.offsets[row + 1]
            for at in range(start, stop, layout.CHUNK):
                n = min(layout.CHUNK, stop - at)
                read_floats(columns.target, formats[layout.TARGET_FORMAT], at, n, work, layout.LOG_TARGET)
                read_floats(columns.behaviour, formats[layout.BEHAVIOUR_FORMAT], at, n, work, layout.LOG_BEHAVIOUR)
                measured = keep_measured(columns, state, row, at, n)
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
def read_float_column(
    column: NDArray[np.uint8], width: int, state: LaneState, row: int, at: int, n: int, measured: int
) -> None:
    """Read n floats of a column into row `row` of `work`, and keep the measured tokens."""
    read_floats(column, width, at, n, state.work, row)
    if measured < n:
        compact_floats(state.work, row, state.integers, measured)


@compiled
def read_integer_column(
    column: NDArray[np.uint8], width: int, state: LaneState, row: int, at: int, n: int, measured: int
) -> None:
    """Read n integers of a column into row `row` of `integers`, and keep the measured tokens."""
    read_integers(column, width, at, n, state.integers, row)
    if measured < n:
        compact_integers(state.integers, row, measured)


@compiled
def add_to_rollout(columns: LaneColumns, state: LaneState, row: int, at: int, n: int, measured: int) -> float:
    """Add a chunk to its rollout's sums and extremes, and return its largest |d|; its sums stay in `totals`."""
    work, totals, formats = state.work, state.totals, columns.formats
    sum_ratios(work, measured, totals)
    sum_log_probs(work, measured, totals)
    sum_probabilities(work, measured, totals)
    add_moments(state, row, measured)
    if formats[layout.ENTROPY_FORMAT] != 0:
        read_float_column(columns.entropy, formats[layout.ENTROPY_FORMAT], state, layout.ENTROPY, at, n, measured)
        state.rollout_counts[row, layout.ENTROPY_TOKENS] += sum_entropies(work, measured, totals)
    if formats[layout.ADVANTAGE_FORMAT] != 0:
        if formats[layout.ADVANTAGE_PER_ROLLOUT] != 0:
            read_floats(columns.advantage, formats[layout.ADVANTAGE_FORMAT], row, 1, work, layout.ADVANTAGE)
            repeat_first(work, layout.ADVANTAGE, measured)
        else:
            read_float_column(
                columns.advantage, formats[layout.ADVANTAGE_FORMAT], state, layout.ADVANTAGE, at, n, measured
            )
        state.rollout_counts[row, layout.ADVANTAGE_TOKENS] += sum_advantages(work, measured, totals)
        state.counts[layout.BAD_UPDATES] += count_bad_updates(work, measured)
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
    """Add the second moments of a chunk to those of its rollout, each about its own mean.

    Chan, Golub and LeVeque (1979): moments about the chunk's means, plus the moment between the two means.
    """
    totals, means = state.totals, state.rollout
    before = float(state.rollout_counts[row, layout.TOKENS])
    target, behaviour = totals[layout.SUM_TARGET] / n, totals[layout.SUM_BEHAVIOUR] / n
    difference = totals[layout.SUM_DIFFERENCE] / n
    target_squares, behaviour_squares, products, difference_squares = squares_about_means(
        state.work, n, target, behaviour, difference
    )
    if before > 0.0:
        between, share = before * n / (before + n), n / (before + n)
        step_target, step_behaviour = target - means[layout.MEAN_TARGET], behaviour - means[layout.MEAN_BEHAVIOUR]
        step_difference = difference - means[layout.MEAN_DIFFERENCE]
        target_squares += step_target * step_target * between
        behaviour_squares += step_behaviour * step_behaviour * between
        products += step_target * step_behaviour * between
        difference_squares += step_difference * step_difference * between
        target = means[layout.MEAN_TARGET] + step_target * share
        behaviour = means[layout.MEAN_BEHAVIOUR] + step_behaviour * share
        difference = means[layout.MEAN_DIFFERENCE] + step_difference * share
    means[layout.MEAN_TARGET], means[layout.MEAN_BEHAVIOUR] = target, behaviour
    means[layout.MEAN_DIFFERENCE] = difference
    totals[layout.WITHIN_TARGET], totals[layout.WITHIN_BEHAVIOUR] = target_squares, behaviour_squares
    totals[layout.WITHIN_PRODUCT], totals[layout.WITHIN_DIFFERENCE] = products, difference_squares


@compiled
def add_runs_of_chunk(
    columns: LaneColumns, lookups: Lookups, state: LaneState, row: int, at: int, n: int, measured: int, max_abs_d: float
) -> None:
    """Add a chunk to the buckets by position, turn and lag, and to the weights of its turns."""
    formats = columns.formats
    add_positions(state, at - columns.offsets[row], n, measured, max_abs_d)
    if formats[layout.TURN_FORMAT] != 0:
        read_integer_column(columns.turn, formats[layout.TURN_FORMAT], state, layout.TURN, at, n, measured)
        add_values(state, layout.TURN, lookups.turn, layout.TURN_BUCKETS, measured, max_abs_d)
        add_turns(state, row, measured, state.rollout_counts[row, layout.TOKENS])
    if formats[layout.LAG_FORMAT] != 0:
        read_integer_column(columns.lag, formats[layout.LAG_FORMAT], state, layout.LAG, at, n, measured)
        add_values(state, layout.LAG, lookups.lag, layout.LAG_BUCKETS, measured, max_abs_d)
