"""Merge the sums of all lanes, in the order of the lanes, into the RolloutSums of the batch."""

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
    """Fill the per-rollout fields other than `sums`, which the lanes write themselves."""
    result.tokens = counts[:, layout.TOKENS].copy()
    result.generated = counts[:, layout.GENERATED].copy()
    result.entropy_tokens = counts[:, layout.ENTROPY_TOKENS].copy()
    result.advantage_tokens = counts[:, layout.ADVANTAGE_TOKENS].copy()
    result.turns = counts[:, layout.TURNS].copy()
    measured = result.tokens > 0
    result.min_d = np.where(measured, ranges[:, 0], math.nan)
    result.max_d = np.where(measured, ranges[:, 1], math.nan)


def fill_totals(result: RolloutSums, states: Sequence[LaneState]) -> None:
    """Fill the fields over all rollouts, except the sums by token id."""
    counts = _sum([state.counts for state in states])
    result.nonfinite_target = int(counts[layout.NONFINITE_TARGET])
    result.nonfinite_behaviour = int(counts[layout.NONFINITE_BEHAVIOUR])
    result.bad_updates = int(counts[layout.BAD_UPDATES])
    result.max_probability_difference = max(float(state.largest_difference[0]) for state in states)
    histogram = _sum([state.histogram for state in states])
    result.histogram = histogram[:-1].reshape(2, layout.FINE_SIZE)
    result.zero_tokens = int(histogram[-1])
    bucket_sums = functools.reduce(
        CompensatedSums.__add__, (CompensatedSums(state.bucket_sums_high, state.bucket_sums_low) for state in states)
    )
    weights = slice(layout.TAIL_BUCKETS)
    result.weight_sums = (bucket_sums.high[weights] + bucket_sums.low[weights]).reshape(
        2, layout.COARSE_SIZE, layout.SUMS_PER_BUCKET
    )
    bucket_tokens = _sum([copy for state in states for copy in state.bucket_tokens.reshape(2, -1)])
    _fill_tails(result, bucket_sums, bucket_tokens)
    bucket_max_abs_d = functools.reduce(
        np.maximum, [copy for state in states for copy in state.bucket_max_abs_d.reshape(2, -1)]
    )
    for name, first in layout.CONDITION_BUCKETS.items():
        own = slice(first, first + CONDITIONS[name].size)
        result.conditions[name] = BucketSums(
            bucket_tokens[own], CompensatedSums(bucket_sums.high[own], bucket_sums.low[own]), bucket_max_abs_d[own]
        )
    result.largest_minus_d, result.largest_d = (_largest(states, side) for side in range(2))
    result.token_weights = _log_weights(states, (layout.PLAIN_TOKENS, layout.SCALED_TOKENS))
    result.turn_weights = _log_weights(states, (layout.SCALED_TURNS,))


def _sum(parts: Sequence[Int64]) -> Int64:
    """Return the sum of arrays of one shape; `np.sum` of a list would copy them first."""
    return functools.reduce(np.add, parts)


def _fill_tails(result: RolloutSums, bucket_sums: CompensatedSums, bucket_tokens: Int64) -> None:
    """Sum the buckets between two levels to totals beyond each level."""
    own = slice(layout.TAIL_BUCKETS, layout.TAIL_BUCKETS + 2 * layout.LEVELS)
    between = bucket_tokens[own].reshape(2, layout.LEVELS)
    result.tail_counts = np.cumsum(between[:, ::-1], axis=1)[:, ::-1].copy()
    filled = [any(counts) for counts in between.T.tolist()]
    if not any(filled):
        return
    high = bucket_sums.high[own].reshape(2, layout.LEVELS, layout.SUMS_PER_BUCKET)
    low = bucket_sums.low[own].reshape(2, layout.LEVELS, layout.SUMS_PER_BUCKET)
    running = CompensatedSums.zeros(2, layout.SUMS_PER_BUCKET)
    for level in reversed(range(layout.LEVELS)):
        # Most levels of a small step are empty.
        if filled[level]:
            running = running + CompensatedSums(high[:, level], low[:, level])
        result.tail_sums[:, level] = running.value


def _largest(states: Sequence[LaneState], side: int) -> Float64:
    """Return the LARGEST_VALUES largest values of all lanes, falling."""
    parts = [state.largest[side, : state.largest_kept[side]] for state in states]
    return np.sort(parts[0] if len(parts) == 1 else np.concatenate(parts))[::-1][:LARGEST_VALUES].copy()


def _log_weights(states: Sequence[LaneState], rows: tuple[int, ...]) -> LogWeights:
    parts = [_weights_of(state, row) for state in states for row in rows]
    return functools.reduce(LogWeights.merge, parts)


def _weights_of(state: LaneState, row: int) -> LogWeights:
    count = int(state.weight_counts[row])
    if count == 0:
        return LogWeights()
    largest, total, squares = state.weights[row].tolist()
    # Plain sums are not yet scaled by the largest weight.
    scale = math.exp(-largest) if row == layout.PLAIN_TOKENS else 1.0
    return LogWeights(count, largest, total * scale, squares * scale * scale)


def token_id_sums(tables: Float64, ids: Int64 | None, merge_tables: MergeFunction) -> TokenIdSums:
    """Return the sums by token id of the lanes' tables [L, V, ID_COLUMNS]; row i is of `ids[i]`, or of id i if None."""
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
    """Return the compiled function that adds the token-id tables [L, V, 4] of all lanes, in order, with compensation.

    It fills `ids` [V], rising, `tokens` [V], `high` and `low` [V, 3] from the front, and returns the number of rows
    filled.
    """

    def merge_tables(tables: Float64, ids: Int64, tokens: Int64, high: Float64, low: Float64) -> int:
        # A built-in constant: numba's cache then never returns machine code of other sources.
        assert sources != 0
        return add_tables(tables, ids, tokens, high, low)

    return entry(merge_tables, cached=cached)


@exactly
def add_tables(tables: Float64, ids: Int64, tokens: Int64, high: Float64, low: Float64) -> int:
    """Add the tables of all lanes; see `merge_function`."""
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
