"""The loops of the compiled pass, which add a rollout in blocks of tokens. One machine code serves all batches.

Importing this module imports numba.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from foreshock.measures.passes import token_terms as terms
from foreshock.measures.passes.token_terms import inner
from foreshock.measures.statistics.rollout_sums import TOKEN_SUMS
from foreshock.measures.statistics.tails import LARGEST_VALUES

Float64 = NDArray[np.float64]
Int64 = NDArray[np.int64]
# A column as (narrow, wide): float32 and float64, or int32 and int64. One is empty; both are if it was not logged.
Floats = tuple[NDArray[np.float32], Float64]
Integers = tuple[NDArray[np.int32], Int64]

BLOCK = 512
_BLOCKS_BETWEEN_FLUSHES = 16  # of plain sums into compensated sums
# The largest d are kept in a buffer, which is cut to LARGEST_VALUES when it is full.
_BUFFER = 4096
# The counts of a rollout, in this order.
TOKENS, GENERATED, ENTROPY_TOKENS, ADVANTAGE_TOKENS, TURNS = range(5)
# The places of conditions in Layout.edges; the last three have buckets of their own.
PROBABILITY, OF_ENTROPY, POSITION, TURN, LAG = range(5)


class Columns(NamedTuple):
    """The columns of N rollouts cut by `offsets` [N + 1]."""

    offsets: Int64
    target: Floats
    behaviour: Floats
    generated: NDArray[np.bool_]  # empty: all are
    entropy: Floats
    advantage: Floats  # [T], or [N] if `advantage_of_rollout`
    advantage_of_rollout: bool
    turn: Integers
    lag: Integers
    token_ids: Integers
    rows_of_ids: Int64  # the row of each id in `Totals.token_ids`; empty: the id itself


class Layout(NamedTuple):
    """The buckets: those of the weights' grid, of the tails, of position, turn and lag, and of probability × entropy.

    A grid is (bits of the mantissa that are dropped, first bin, last bin); see `BitGrid`. A token has one bucket for
    its probability and its entropy, so that its terms are added once; `compiled` sums the rows and the columns.
    """

    fine: Int64
    coarse: Int64
    levels: Float64  # of tails, ascending
    first_tail: int
    first: Int64  # [5]: the first bucket of each condition; that of probability × entropy at PROBABILITY
    edges: Float64  # [5, E]: edge i is the lower one of bucket i + 1; padded with ∞ to a multiple of 4
    entropies: int  # buckets of the entropy; one more, the last of each probability, is of unknown entropy
    size: int  # of all buckets


class Totals(NamedTuple):
    """The sums: of each of N rollouts, and over all of them.

    Even and odd tokens have separate buckets, because a sum must be stored before it is loaded again. The plain sums
    are flushed into the compensated pairs `high` and `low`.
    """

    sums: Float64  # [N, TOKEN_SUMS]
    counts: Int64  # [N, 5]
    ranges: Float64  # [N, 2]: the least and the largest d
    nonfinite: Int64  # [2]: generated tokens whose log π, log μ is not finite
    bad_updates: Int64  # [1]
    largest_difference: Float64  # [1]: |π − μ|
    histogram: Int64  # [2 × fine + 1]: of negative and of positive d; the last counts zeros
    plain: Float64  # [2, B, 4]
    high: Float64  # [B, 4]
    low: Float64
    tokens: Int64  # [2, B]
    largest: Float64  # [2, B]: |d|
    token_ids: Float64  # [V, 4]: tokens, Σ d, Σ |d|, Σ k3
    token_weights: Float64  # [3]: (largest log weight, Σ w, Σ w²), the sums scaled as in LogWeights
    turn_weights: Float64  # [3]
    extremes: Float64  # [2, _BUFFER]: the largest −d and d, in any order
    kept: Int64  # [2]: their number
    floors: Float64  # [2]: values up to this need not be kept
    turn: Int64  # [2]: the open turn, the number of turns of its rollout
    turn_d: Float64  # [1]: Σ d of the open turn
    block: Float64  # [TOKEN_SUMS]
    work: Float64
    buckets: Int64  # [BLOCK]
    integers: Int64  # [BLOCK]
    places: Int64  # [BLOCK]: of the measured tokens


def new_totals(rollouts: int, bins: int, buckets: int, ids: int) -> Totals:
    """Return empty sums."""
    return Totals(
        sums=np.zeros((rollouts, len(TOKEN_SUMS))),
        counts=np.zeros((rollouts, 5), np.int64),
        ranges=np.full((rollouts, 2), np.nan),
        nonfinite=np.zeros(2, np.int64),
        bad_updates=np.zeros(1, np.int64),
        largest_difference=np.zeros(1),
        histogram=np.zeros(2 * bins + 1, np.int64),
        plain=np.zeros((2, buckets, 4)),
        high=np.zeros((buckets, 4)),
        low=np.zeros((buckets, 4)),
        tokens=np.zeros((2, buckets), np.int64),
        largest=np.zeros((2, buckets)),
        token_ids=np.zeros((ids, 4)),
        token_weights=np.array([-np.inf, 0.0, 0.0]),
        turn_weights=np.array([-np.inf, 0.0, 0.0]),
        extremes=np.full((2, _BUFFER), -np.inf),
        kept=np.zeros(2, np.int64),
        floors=np.full(2, -np.inf),
        turn=np.zeros(2, np.int64),
        turn_d=np.zeros(1),
        block=np.zeros(len(TOKEN_SUMS)),
        work=np.zeros((terms.ROWS, BLOCK)),
        buckets=np.zeros(BLOCK, np.int64),
        integers=np.zeros(BLOCK, np.int64),
        places=np.zeros(BLOCK, np.int64),
    )


@inner
def _keep_largest(n: int, side: int, most: float, totals: Totals) -> None:
    """Keep the values of d (side 1) or −d (side 0) above the floor; `most` is the largest of them."""
    values, work, sign = totals.extremes[side], totals.work, 1.0 if side == 1 else -1.0
    if most <= totals.floors[side]:
        return
    kept, floor = totals.kept[side], totals.floors[side]
    for i in range(n):
        value = sign * work[terms.D, i]
        if value > floor:
            values[kept] = value
            kept += 1
    if kept > _BUFFER - BLOCK:
        terms.move_largest_first(values[:kept], LARGEST_VALUES)
        kept, totals.floors[side] = LARGEST_VALUES, terms.range_of(values[:LARGEST_VALUES])[0]
    totals.kept[side] = kept


@inner
def _add_tokens(n: int, totals: Totals) -> None:
    """Add n tokens to their buckets."""
    work, buckets = totals.work, totals.buckets
    for i in range(n):
        # Unsigned, so that no index counts from the end.
        bank, bucket, abs_d = np.uint64(i & 1), np.uint64(buckets[i]), work[terms.ABS_D, i]
        d, k3, difference = work[terms.D, i], work[terms.K3, i], work[terms.DIFFERENCE, i]
        totals.plain[bank, bucket, 0] += abs_d
        totals.plain[bank, bucket, 1] += d
        totals.plain[bank, bucket, 2] += k3
        totals.plain[bank, bucket, 3] += difference
        totals.tokens[bank, bucket] += 1
        if abs_d > totals.largest[bank, bucket]:
            totals.largest[bank, bucket] = abs_d


@inner
def _add_runs(n: int, condition: int, before: int, most: float, layout: Layout, totals: Totals) -> None:
    """Add n tokens to the buckets of their `integers`, one run of equal integers at a time.

    Integers rarely change: a run is mostly the whole block. `most` is the block's largest |d|, `before` the number of
    the rollout's earlier tokens.
    """
    values, work, block = totals.integers, totals.work, totals.block
    others = 0
    for i in range(n):
        others += values[i] != values[0]
    begin = 0
    while begin < n:
        end = begin + 1 if others else n
        while end < n and values[end] == values[begin]:
            end += 1
        abs_d, d, k3, difference, largest = block[1], block[0], block[3], block[13], most
        if others:
            abs_d, d = terms.sum_of(work[terms.ABS_D, begin:end]), terms.sum_of(work[terms.D, begin:end])
            k3, difference = terms.sum_of(work[terms.K3, begin:end]), terms.sum_of(work[terms.DIFFERENCE, begin:end])
            largest = terms.range_of(work[terms.ABS_D, begin:end])[1]
        bucket, edges = layout.first[condition], layout.edges[condition]
        for edge in range(edges.size):
            bucket += values[begin] >= edges[edge]
        totals.plain[0, bucket, 0] += abs_d
        totals.plain[0, bucket, 1] += d
        totals.plain[0, bucket, 2] += k3
        totals.plain[0, bucket, 3] += difference
        totals.tokens[0, bucket] += end - begin
        totals.largest[0, bucket] = max(totals.largest[0, bucket], largest)
        if condition == TURN:
            _add_turn(values[begin], d, before + begin == 0, totals)
        begin = end


@inner
def _add_turn(turn: int, d: float, is_first: bool, totals: Totals) -> None:
    """Add a run of tokens to the open turn of the rollout; another turn number closes it and opens the next."""
    if not is_first and turn != totals.turn[0]:
        terms.add_scaled(totals.turn_weights, totals.turn_d[0], 1.0, 1.0)
    if is_first or turn != totals.turn[0]:
        totals.turn[0], totals.turn_d[0] = turn, 0.0
        totals.turn[1] += 1
    totals.turn_d[0] += d


@inner
def _add_grids(n: int, with_advantage: bool, layout: Layout, totals: Totals) -> None:
    """Add n tokens to the histogram of |d| and to the sums of importance weights."""
    work, buckets, zeros = totals.work, totals.buckets, 0
    terms.fill_bins(n, layout.fine, work, buckets)
    for i in range(n):
        totals.histogram[np.uint64(buckets[i])] += 1
    for i in range(n):
        zeros += work[terms.ABS_D, i] == 0.0
    totals.histogram[0] -= zeros
    totals.histogram[2 * layout.fine[2] + 2] += zeros
    terms.fill_bins(n, layout.coarse, work, buckets)
    for i in range(n):
        bank, bucket, above = np.uint64(i & 1), np.uint64(buckets[i]), work[terms.ABOVE, i]
        totals.plain[bank, bucket, 0] += above
        totals.plain[bank, bucket, 1] += above * above
        if with_advantage:
            totals.plain[bank, bucket, 2] += work[terms.ADVANTAGE, i]
            totals.plain[bank, bucket, 3] += work[terms.SKEW, i]


@inner
def _add_tails(n: int, with_advantage: bool, layout: Layout, totals: Totals) -> None:
    """Add each token beyond the first level to the bucket of the last level that it exceeds."""
    work, levels = totals.work, layout.levels
    for i in range(n):
        abs_d = work[terms.ABS_D, i]
        if abs_d <= levels[0]:
            continue
        beyond = 0
        while beyond + 1 < levels.size and abs_d > levels[beyond + 1]:
            beyond += 1
        bucket = layout.first_tail + beyond + (levels.size if work[terms.D, i] > 0.0 else 0)
        above = work[terms.ABOVE, i]
        totals.tokens[0, bucket] += 1
        totals.plain[0, bucket, 0] += above
        totals.plain[0, bucket, 1] += above * above
        if with_advantage:
            totals.plain[0, bucket, 2] += work[terms.ADVANTAGE, i]
            totals.plain[0, bucket, 3] += work[terms.SKEW, i]


@inner
def _add_token_ids(n: int, rows: Int64, totals: Totals) -> None:
    """Add n tokens to the table by token id; `rows` are those of the ids, or empty."""
    work, table, ids = totals.work, totals.token_ids, totals.integers
    for i in range(n):
        row = np.uint64(ids[i] if rows.size == 0 else rows[np.uint64(ids[i])])
        d, abs_d, k3 = work[terms.D, i], work[terms.ABS_D, i], work[terms.K3, i]
        table[row, 0] += 1.0
        table[row, 1] += d
        table[row, 2] += abs_d
        table[row, 3] += k3


@inner
def _flush(totals: Totals) -> None:
    """Add the plain sums of all buckets to their compensated pairs, and reset them."""
    even, odd = totals.plain[0].reshape(-1), totals.plain[1].reshape(-1)
    high, low = totals.high.reshape(-1), totals.low.reshape(-1)
    for i in range(high.size):
        value, before = even[i] + odd[i], high[i]
        total = before + value
        of_value = total - before
        lost = (before - (total - of_value)) + (value - of_value)
        high[i] = total
        # An infinite sum must stay infinite: its low part would be NaN.
        low[i] += lost if lost - lost == 0.0 else 0.0
        even[i] = odd[i] = 0.0


@inner
def _read(column: Any, at: int, n: int, measured: int, places: Int64, values: Any) -> None:
    """Copy n numbers of a column from token `at` on, and keep those at the `places` of the measured tokens."""
    narrow, wide = column[0][at : at + n], column[1][at : at + n]
    for i in range(narrow.size):
        values[i] = narrow[i]
    for i in range(wide.size):
        values[i] = wide[i]
    if measured < n:
        for i in range(measured):
            values[i] = values[places[i]]


@inner
def _read_log_probs(columns: Columns, row: int, at: int, n: int, totals: Totals) -> int:
    """Read two log-probs of n tokens and keep the measured ones: generated, both finite. Return their number."""
    target, behaviour, places = totals.work[terms.LOG_TARGET], totals.work[terms.LOG_BEHAVIOUR], totals.places
    _read(columns.target, at, n, n, places, target)
    _read(columns.behaviour, at, n, n, places, behaviour)
    generated, finite = n, 0
    masked = columns.generated.size > 0
    for i in range(at, at + n if masked else at):
        generated -= not columns.generated[i]
    for i in range(n):
        finite += (abs(target[i]) < math.inf) & (abs(behaviour[i]) < math.inf)
    totals.counts[row, GENERATED] += generated
    if generated == n and finite == n:
        return n
    measured = 0
    for i in range(n):
        if masked and not columns.generated[at + i]:
            continue
        finite_target, finite_behaviour = abs(target[i]) < math.inf, abs(behaviour[i]) < math.inf
        totals.nonfinite[0] += not finite_target
        totals.nonfinite[1] += not finite_behaviour
        if finite_target and finite_behaviour:
            target[measured], behaviour[measured], places[measured] = target[i], behaviour[i], i
            measured += 1
    return measured


@inner
def _add_block(columns: Columns, row: int, at: int, n: int, measured: int, layout: Layout, totals: Totals) -> None:
    """Add the measured tokens among n to all totals except `sums` and the sums over ratios in `block`."""
    work, block, places = totals.work, totals.block, totals.places
    counts, before = totals.counts[row], totals.counts[row, TOKENS]
    terms.fill_probabilities(measured, work)
    terms.sum_probabilities(measured, work, block)
    if before > 0:
        terms.join_moments(before, measured, totals.sums[row], block)
    with_advantage = columns.advantage[0].size + columns.advantage[1].size > 0
    if with_advantage:
        if columns.advantage_of_rollout:
            _read(columns.advantage, row, 1, 1, places, work[terms.ADVANTAGE])
            for i in range(1, measured):
                work[terms.ADVANTAGE, i] = work[terms.ADVANTAGE, 0]
        else:
            _read(columns.advantage, at, n, measured, places, work[terms.ADVANTAGE])
        counts[ADVANTAGE_TOKENS] += terms.sum_advantages(measured, work, block)
        totals.bad_updates[0] += terms.count_bad_updates(measured, work)
    least, most = terms.range_of(work[terms.D, :measured])
    furthest = max(-least, most)
    totals.ranges[row, 0], totals.ranges[row, 1] = (
        (min(totals.ranges[row, 0], least), max(totals.ranges[row, 1], most)) if before > 0 else (least, most)
    )
    difference = terms.range_of(work[terms.DIFFERENCE, :measured])[1]
    totals.largest_difference[0] = max(totals.largest_difference[0], difference)
    terms.add_weights(measured, most, work, totals.token_weights)
    _keep_largest(measured, 0, -least, totals)
    _keep_largest(measured, 1, most, totals)
    edges, buckets, of_entropy = layout.edges, totals.buckets, totals.integers
    terms.fill_buckets(work[terms.LOG_BEHAVIOUR, :measured], edges[PROBABILITY], 0, buckets)
    if columns.entropy[0].size + columns.entropy[1].size > 0:
        _read(columns.entropy, at, n, measured, places, work[terms.ENTROPY])
        counts[ENTROPY_TOKENS] += terms.sum_entropies(measured, work, block)
        terms.fill_buckets(work[terms.ENTROPY, :measured], edges[OF_ENTROPY], layout.entropies, of_entropy)
    else:
        of_entropy[:measured] = layout.entropies
    for i in range(measured):
        buckets[i] = layout.first[PROBABILITY] + buckets[i] * (layout.entropies + 1) + of_entropy[i]
    _add_tokens(measured, totals)
    for i in range(measured):
        place = at - columns.offsets[row] + (i if measured == n else places[i])
        # The exponent of the power of two at or below position + 1.
        totals.integers[i] = (np.float64(place + 1).view(np.int64) >> 52) - 1023
    _add_runs(measured, POSITION, before, furthest, layout, totals)
    if columns.lag[0].size + columns.lag[1].size > 0:
        _read(columns.lag, at, n, measured, places, totals.integers)
        _add_runs(measured, LAG, before, furthest, layout, totals)
    if columns.turn[0].size + columns.turn[1].size > 0:
        _read(columns.turn, at, n, measured, places, totals.integers)
        _add_runs(measured, TURN, before, furthest, layout, totals)
    _add_grids(measured, with_advantage, layout, totals)
    if furthest > layout.levels[0]:
        _add_tails(measured, with_advantage, layout, totals)
    if columns.token_ids[0].size + columns.token_ids[1].size > 0:
        _read(columns.token_ids, at, n, measured, places, totals.integers)
        _add_token_ids(measured, columns.rows_of_ids, totals)


def entry(sources: int) -> Callable[[Columns, Layout, Totals, bool], int]:
    """Return the function to compile, which returns `sources`, a digest of the other files.

    numba's cache detects edits of this file and a change of `sources`.
    """

    def add_rollouts(columns: Columns, layout: Layout, totals: Totals, everything: bool) -> int:
        """Add all rollouts to `totals`; without `everything` only tokens and the sums of log-probs, d and ρ."""
        blocks = 0
        for row in range(columns.offsets.size - 1):
            stop = columns.offsets[row + 1]
            for at in range(columns.offsets[row], stop, BLOCK):
                n = min(BLOCK, stop - at)
                measured = _read_log_probs(columns, row, at, n, totals)
                if measured == 0:
                    continue
                terms.fill_ratios(measured, totals.work)
                terms.sum_ratios(measured, totals.work, totals.block)
                if everything:
                    _add_block(columns, row, at, n, measured, layout, totals)
                for k in range(totals.block.size):
                    totals.sums[row, k] += totals.block[k]
                totals.counts[row, TOKENS] += measured
                blocks += 1
                if blocks == _BLOCKS_BETWEEN_FLUSHES:
                    _flush(totals)
                    blocks = 0
            if everything and totals.turn[1] > 0:
                terms.add_scaled(totals.turn_weights, totals.turn_d[0], 1.0, 1.0)
                totals.counts[row, TURNS], totals.turn[1] = totals.turn[1], 0
        _flush(totals)
        return sources

    return add_rollouts
