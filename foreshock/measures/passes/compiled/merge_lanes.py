"""From the sums of lanes to those of the batch, lane by lane in their order."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from foreshock.measures.passes.compiled import array_layout as layout
from foreshock.measures.passes.compiled.jit import entry, exactly
from foreshock.measures.passes.compiled.lane_state import LaneState
from foreshock.measures.statistics.bucket_sums import BucketSums
from foreshock.measures.statistics.compensated_sums import CompensatedSums
from foreshock.measures.statistics.conditions import CONDITIONS
from foreshock.measures.statistics.log_weights import LogWeights
from foreshock.measures.statistics.rollout_sums import RolloutSums
from foreshock.measures.statistics.tails import LARGEST_VALUES
from foreshock.measures.statistics.token_ids import TokenIdSums

__all__ = ["MergeFunction", "fill_rollouts", "fill_totals", "merge_function", "token_id_sums"]

Float64 = NDArray[np.float64]
Int64 = NDArray[np.int64]


MergeFunction = Callable[[Float64, Int64, Int64, Float64, Float64], int]


def fill_rollouts(result: RolloutSums, ranges: Float64, counts: Int64) -> None:
    """What each rollout keeps for itself, beside the sums that lanes have written already."""
    result.tokens = counts[:, layout.TOKENS].copy()
    result.generated = counts[:, layout.GENERATED].copy()
    result.entropy_tokens = counts[:, layout.ENTROPY_TOKENS].copy()
    result.advantage_tokens = counts[:, layout.ADVANTAGE_TOKENS].copy()
    result.turns = counts[:, layout.TURNS].copy()
    measured = result.tokens > 0
    result.min_d = np.where(measured, ranges[:, 0], math.nan)
    result.max_d = np.where(measured, ranges[:, 1], math.nan)


def fill_totals(result: RolloutSums, states: Sequence[LaneState]) -> None:
    """What is of all rollouts together, but for the sums by token id."""
    counts = np.sum([state.counts for state in states], axis=0)
    result.nonfinite_target = int(counts[layout.NONFINITE_TARGET])
    result.nonfinite_behaviour = int(counts[layout.NONFINITE_BEHAVIOUR])
    result.bad_updates = int(counts[layout.BAD_UPDATES])
    result.max_probability_difference = max(float(state.largest_difference[0]) for state in states)
    histogram = np.sum([state.histogram for state in states], axis=0)
    result.histogram = histogram[:-1].reshape(2, layout.FINE_SIZE).copy()
    result.zero_tokens = int(histogram[-1])
    cells = functools.reduce(
        CompensatedSums.__add__, (CompensatedSums(state.cells_high, state.cells_low) for state in states)
    )
    result.weight_sums = cells.value[: layout.TAIL_CELLS].reshape(2, layout.COARSE_SIZE, layout.CELL_SUMS).copy()
    cell_tokens = np.sum([state.cell_tokens.reshape(2, -1) for state in states], axis=(0, 1))
    _fill_tails(result, cells, cell_tokens)
    cell_largest = np.max([state.cell_largest.reshape(2, -1) for state in states], axis=(0, 1))
    for name, first in layout.CONDITION_CELLS.items():
        own = slice(first, first + CONDITIONS[name].size)
        result.conditions[name] = BucketSums(
            cell_tokens[own].copy(),
            CompensatedSums(cells.high[own].copy(), cells.low[own].copy()),
            cell_largest[own].copy(),
        )
    result.largest_minus_d, result.largest_d = (_largest(states, side) for side in range(2))
    result.token_weights = _log_weights(states, (layout.PLAIN_TOKENS, layout.SCALED_TOKENS))
    result.turn_weights = _log_weights(states, (layout.SCALED_TURNS,))


def _fill_tails(result: RolloutSums, cells: CompensatedSums, cell_tokens: Int64) -> None:
    """From tokens between two levels to those beyond each."""
    own = slice(layout.TAIL_CELLS, layout.TAIL_CELLS + 2 * layout.LEVELS)
    between = cell_tokens[own].reshape(2, layout.LEVELS)
    result.tail_counts = np.cumsum(between[:, ::-1], axis=1)[:, ::-1].copy()
    high = cells.high[own].reshape(2, layout.LEVELS, layout.CELL_SUMS)
    low = cells.low[own].reshape(2, layout.LEVELS, layout.CELL_SUMS)
    running = CompensatedSums.zeros(2, layout.CELL_SUMS)
    for level in reversed(range(layout.LEVELS)):
        running = running + CompensatedSums(high[:, level], low[:, level])
        result.tail_sums[:, level] = running.value


def _largest(states: Sequence[LaneState], side: int) -> Float64:
    """The largest values of all lanes, falling."""
    values = np.concatenate([state.largest[side, : state.largest_kept[side]] for state in states])
    return np.sort(values)[::-1][:LARGEST_VALUES].copy()


def _log_weights(states: Sequence[LaneState], rows: tuple[int, ...]) -> LogWeights:
    parts = [_weights_of(state, row) for state in states for row in rows]
    return functools.reduce(LogWeights.merge, parts)


def _weights_of(state: LaneState, row: int) -> LogWeights:
    count = int(state.weight_counts[row])
    if count == 0:
        return LogWeights()
    largest, total, squares = state.weights[row].tolist()
    # The plain sums have not been scaled by the largest yet.
    scale = math.exp(-largest) if row == layout.PLAIN_TOKENS else 1.0
    return LogWeights(count, largest, total * scale, squares * scale * scale)


def token_id_sums(tables: Float64, ids: Int64 | None, merge_tables: MergeFunction) -> TokenIdSums:
    """The sums by token id of the lanes' tables [L, V, ID_COLUMNS]; row i is of `ids[i]`, or of the id i."""
    size = tables.shape[1]
    if size == 0:
        return TokenIdSums.empty()
    rows, tokens = np.empty(size, np.int64), np.empty(size, np.int64)
    high, low = np.empty((size, layout.ID_COLUMNS - 1)), np.empty((size, layout.ID_COLUMNS - 1))
    found = merge_tables(tables, rows, tokens, high, low)
    return TokenIdSums(
        rows[:found] if ids is None else ids[rows[:found]],
        tokens[:found],
        CompensatedSums(high[:found], low[:found]),
        np.zeros(found),
    )


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
