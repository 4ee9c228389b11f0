"""The token pass as machine code: the sums of `numpy_pass`, several times faster and without the GIL.

It needs numba (the extra `fast`), which only `prepare()` imports. `prepare()` compiles, which takes up to a minute, or
loads the machine code from numba's cache on disk. After that `passes.sum_rollouts` uses this pass. To fill the cache
from another process, run `python -m foreshock.measures.passes.compiled`.

The loops add a rollout in blocks of tokens. First the terms of each token of a block, and their sums over the block:
the rows of `work` [ROWS, BLOCK] hold the terms, `block` [TOKEN_SUMS] their sums, and LLVM can vectorise the loops. Then
the sums of rollouts and of buckets. One machine code serves all batches.
"""

from __future__ import annotations

import functools
import importlib.util
import math
import threading
from collections import namedtuple
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from foreshock.measures.inputs import TokenInputs
from foreshock.measures.passes.measured import add_largest_and_turns, measured_tokens
from foreshock.measures.statistics.conditions import CONDITIONS, BucketSums
from foreshock.measures.statistics.histograms import LOG_RATIO_GRID, WEIGHT_GRID, BitGrid
from foreshock.measures.statistics.log_weights import LogWeights
from foreshock.measures.statistics.rollout_sums import DPPO_PROBABILITY_GAP, TOKEN_SUMS, RolloutSums
from foreshock.measures.statistics.tails import FIRST_REGION, LEVEL_OF_BIN, REGIONS
from foreshock.measures.statistics.token_ids import TokenIdSums

Float64 = NDArray[np.float64]
Int64 = NDArray[np.int64]
AddRollouts = Callable[..., None]
Scalar = TypeVar("Scalar", bound=np.generic)
_Loop = TypeVar("_Loop", bound=Callable[..., Any])

# No reference counting (`_nrt`): the caller holds all arrays.
_OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy", "fastmath": {"contract"}, "_nrt": False}
# The loops and their options, in the order in which they are defined; `prepare()` compiles them.
_LOOPS: list[tuple[Callable[..., Any], dict[str, Any]]] = []


def _loop(function: _Loop) -> _Loop:
    # No wrappers for calls from Python: for many arrays they take most of the compile time.
    _LOOPS.append((function, _OPTIONS | {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}))
    return function


def _reduction(function: _Loop) -> _Loop:
    """Allow vectorised sums and fused multiply-adds; NaN and infinity follow IEEE 754."""
    _LOOPS.append((function, _OPTIONS | {"fastmath": {"reassoc", "contract"}}))
    return function


# Up to this |d| the sums of ρ and ρ² of a block are within the range of a float64.
_PLAIN_LIMIT = 300.0
_MAGNITUDE = 0x7FFF_FFFF_FFFF_FFFF  # all bits of a float64 except the sign

# Rows of `work`, [ROWS, BLOCK]. GROWTH is exp|d| − 1, SHRINKAGE 1 − exp(−|d|), DECAY exp(−|d|), ABOVE ρ − 1; TARGET and
# BEHAVIOUR are probabilities; SKEW is A·(ρ − 1).
(
    LOG_TARGET, LOG_BEHAVIOUR, D, ABS_D, GROWTH, SHRINKAGE, DECAY, ABOVE, K3, TARGET, BEHAVIOUR, DIFFERENCE, ENTROPY,
    ADVANTAGE, SKEW,
) = range(15)  # fmt: skip
ROWS = 15

# e^x is written so that a compiler without a vector library can vectorise it. x = k·ln 2 + r with |r| ≤ ln 2 / 2:
# adding 1.5·2^52 rounds to the integer k and leaves it in the last bits; a shift turns it into the exponent of 2^k.
# (e^r − 1 − r)/r² is a polynomial. Results are accurate to about two units in the last place, including k3 near 0,
# where expm1(d) − d is not.
_LOG2_E = 1.4426950408889634
_ROUNDER = 6755399441055744.0  # 1.5·2^52
# ln 2 in two parts; the first has few enough digits that k times it is exact.
_LN2_HIGH = 6.93147180369123816490e-01
_LN2_LOW = 1.90821492927058770002e-10
# Above this e^x is infinite: the exponent field overflows to infinity by itself.
_OVERFLOWS = 710.0
# Below this e^x is smaller than the smallest normal number, and counts as 0.
_UNDERFLOWS = -707.0
# Replaces infinity to avoid ∞·0.
_HUGE = 1e300
# Below this x, k is 0 and the polynomial alone is e^x − 1 − x.
_HALF_LN2 = 0.34
_C = tuple(1.0 / math.factorial(power) for power in range(2, 14))


@_loop
def _reduced(x: float) -> tuple[float, float, float]:
    """Return 2^k / 2, r, and e^r − 1 − r."""
    shifted = x * _LOG2_E + _ROUNDER
    k = shifted - _ROUNDER
    r = (x - k * _LN2_HIGH) - k * _LN2_LOW
    square = r * r
    even = _C[0] + square * (_C[2] + square * (_C[4] + square * (_C[6] + square * (_C[8] + square * _C[10]))))
    odd = _C[1] + square * (_C[3] + square * (_C[5] + square * (_C[7] + square * (_C[9] + square * _C[11]))))
    half_scale = np.int64((np.float64(shifted).view(np.int64) + 1022) << 52).view(np.float64)
    return half_scale, r, square * (even + r * odd)


@_loop
def fill_ratios(n: int, work: Float64) -> None:
    """Compute d, |d| and the terms of e^|d| of n tokens."""
    for i in range(n):
        d = work[LOG_TARGET, i] - work[LOG_BEHAVIOUR, i]
        x = abs(d)
        half_scale, r, rest = _reduced(x if x < _OVERFLOWS else _OVERFLOWS)
        growth = 2.0 * (half_scale * (r + rest) + (half_scale - 0.5))
        k3_above = rest if x < _HALF_LN2 else growth - x
        finite_growth = growth if growth < _HUGE else _HUGE
        finite_k3 = k3_above if k3_above < _HUGE else _HUGE
        decay = 1.0 / (1.0 + finite_growth)
        shrinkage = finite_growth * decay
        # x − (1 − e^−x), without cancellation.
        k3_below = x * shrinkage - finite_k3 * decay
        work[D, i] = d
        work[ABS_D, i] = x
        work[GROWTH, i] = growth
        work[SHRINKAGE, i] = shrinkage
        work[DECAY, i] = decay
        work[ABOVE, i] = growth if d > 0.0 else -shrinkage
        work[K3, i] = k3_above if d > 0.0 else k3_below


@_loop
def fill_probabilities(n: int, work: Float64) -> None:
    """Compute π, μ and |π − μ| of n tokens from one exponential, that of the larger probability."""
    for i in range(n):
        # All loads come before the selects: a load that depends on a select is not vectorised.
        log_target, log_behaviour, lower = work[LOG_TARGET, i], work[LOG_BEHAVIOUR, i], work[D, i] < 0.0
        decay, shrinkage = work[DECAY, i], work[SHRINKAGE, i]
        larger = log_behaviour if lower else log_target
        bounded = larger if larger < _OVERFLOWS else _OVERFLOWS
        half_scale, r, rest = _reduced(bounded if bounded > _UNDERFLOWS else _UNDERFLOWS)
        value = 2.0 * (half_scale + half_scale * (r + rest))
        probability = value if larger > _UNDERFLOWS else 0.0
        smaller = probability * decay
        work[TARGET, i] = smaller if lower else probability
        work[BEHAVIOUR, i] = probability if lower else smaller
        work[DIFFERENCE, i] = probability * shrinkage


@_reduction
def sum_ratios(n: int, work: Float64, block: Float64) -> None:
    """Sum the log-probs and the terms of d and ρ."""
    d_sum, abs_d, d2, k3, log_target, log_behaviour = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
    for i in range(n):
        d = work[D, i]
        d_sum += d
        abs_d += work[ABS_D, i]
        d2 += d * d
        k3 += work[K3, i]
        log_target += work[LOG_TARGET, i]
        log_behaviour += work[LOG_BEHAVIOUR, i]
    above_sum, chi2, tv, growth_sum, reverse = 0.0, 0.0, 0.0, 0.0, 0.0
    for i in range(n):
        above, growth = work[ABOVE, i], work[GROWTH, i]
        above_sum += above
        chi2 += above * above
        tv += -above if above < 0.0 else 0.0
        growth_sum += growth
        reverse += growth * work[SHRINKAGE, i]
    block[0], block[1], block[2], block[3], block[4], block[5] = d_sum, abs_d, d2, k3, above_sum, chi2
    block[6], block[7], block[8], block[9], block[10] = reverse, tv, growth_sum, log_target, log_behaviour


@_reduction
def sum_probabilities(n: int, work: Float64, block: Float64) -> None:
    """Sum π, μ and |π − μ|, and their squares and the product of π and μ about the block's means."""
    target_sum, behaviour_sum, difference_sum = 0.0, 0.0, 0.0
    for i in range(n):
        target_sum += work[TARGET, i]
        behaviour_sum += work[BEHAVIOUR, i]
        difference_sum += work[DIFFERENCE, i]
    target_mean, behaviour_mean, difference_mean = target_sum / n, behaviour_sum / n, difference_sum / n
    target_squares, behaviour_squares, products, difference_squares = 0.0, 0.0, 0.0, 0.0
    for i in range(n):
        target, behaviour = work[TARGET, i] - target_mean, work[BEHAVIOUR, i] - behaviour_mean
        difference = work[DIFFERENCE, i] - difference_mean
        target_squares += target * target
        behaviour_squares += behaviour * behaviour
        products += target * behaviour
        difference_squares += difference * difference
    block[11], block[12], block[13] = target_sum, behaviour_sum, difference_sum
    block[14], block[15], block[16], block[17] = target_squares, behaviour_squares, products, difference_squares


@_loop
def join_moments(before: int, n: int, sums: Float64, block: Float64) -> None:
    """Add to the block's moments the part between its means and those of the rollout's `before` earlier tokens.

    Chan, Golub and LeVeque (1979).
    """
    between = before * n / (before + n)
    target, behaviour = block[11] / n - sums[11] / before, block[12] / n - sums[12] / before
    difference = block[13] / n - sums[13] / before
    block[14] += target * target * between
    block[15] += behaviour * behaviour * between
    block[16] += target * behaviour * between
    block[17] += difference * difference * between


@_reduction
def sum_entropies(n: int, work: Float64, block: Float64) -> int:
    """Sum H and −log μ − H over the tokens with a finite entropy H; return their number."""
    entropies, surprisals, count = 0.0, 0.0, 0
    for i in range(n):
        entropy, log_behaviour = work[ENTROPY, i], work[LOG_BEHAVIOUR, i]
        known = abs(entropy) < math.inf
        entropies += entropy if known else 0.0
        surprisals += -log_behaviour - entropy if known else 0.0
        count += known
    block[18], block[19] = entropies, surprisals
    return count


@_reduction
def sum_advantages(n: int, work: Float64, block: Float64) -> int:
    """Sum the terms of A; return the number of finite A.

    Set ADVANTAGE to 0 if A is not finite, and SKEW to 0 if A is 0, even if ρ is infinite.
    """
    advantages, products, of_d, count = 0.0, 0.0, 0.0, 0
    for i in range(n):
        advantage, d, above = work[ADVANTAGE, i], work[D, i], work[ABOVE, i]
        known = abs(advantage) < math.inf
        value = advantage if known else 0.0
        product = value * above
        work[ADVANTAGE, i] = value
        work[SKEW, i] = product if value != 0.0 else 0.0
        advantages += value
        products += value * d
        of_d += d if known else 0.0
        count += known
    positive, negative = 0.0, 0.0
    for i in range(n):
        skew = work[SKEW, i]
        positive += skew if work[ADVANTAGE, i] > 0.0 else 0.0
        negative += skew if work[ADVANTAGE, i] < 0.0 else 0.0
    block[20], block[21], block[22], block[23], block[24] = advantages, products, positive, negative, of_d
    return count


@_loop
def count_bad_updates(n: int, gap: float, work: Float64) -> int:
    """Return the number of tokens with A < 0 and μ − π ≥ `gap`."""
    bad, close = 0, 0
    for i in range(n):
        difference, lost = work[DIFFERENCE, i], (work[ADVANTAGE, i] < 0.0) & (work[D, i] < 0.0)
        bad += lost & (difference >= gap)
        close += lost & (abs(difference - gap) < 1e-12)
    if close == 0:
        return bad
    bad = 0
    for i in range(n):  # again, with the C library's functions, as in numpy
        lost = (work[ADVANTAGE, i] < 0.0) & (work[D, i] < 0.0)
        bad += lost and math.exp(work[LOG_BEHAVIOUR, i]) * -math.expm1(work[D, i]) >= gap
    return bad


@_loop
def range_of(values: Float64) -> tuple[float, float]:
    """Return the least and the largest of some values, none of which is NaN.

    Values are compared as integers in the same order, because a comparison of floats is not vectorised.
    """
    bits = values.view(np.int64)
    least = most = bits[0] ^ ((bits[0] >> 63) & _MAGNITUDE)
    for i in range(bits.size):
        key = bits[i] ^ ((bits[i] >> 63) & _MAGNITUDE)
        least, most = min(least, key), max(most, key)
    return _float_of(least), _float_of(most)


@_loop
def _float_of(key: int) -> float:
    """Return the float of a key of `range_of`."""
    value: float = np.int64(key ^ ((key >> 63) & _MAGNITUDE)).view(np.float64)
    return value


@_reduction
def sum_of(values: Float64) -> float:
    """Return the sum."""
    total = 0.0
    for i in range(values.size):
        total += values[i]
    return total


@_reduction
def _sums_of_weights(n: int, work: Float64) -> tuple[float, float]:
    """Return Σρ and Σρ², without cancellation for small ρ."""
    total, squares = 0.0, 0.0
    for i in range(n):
        growth, decay, positive = work[GROWTH, i], work[DECAY, i], work[D, i] > 0.0
        ratio = 1.0 + growth if positive else decay
        total += ratio
        squares += ratio * ratio
    return total, squares


@_loop
def add_scaled(weights: Float64, largest: float, total: float, squares: float) -> None:
    """Add weights with the sum total·e^largest and the sum of squares squares·e^(2·largest) to a row of `weights`."""
    most = max(weights[0], largest)
    known, added = math.exp(weights[0] - most), math.exp(largest - most)
    weights[0] = most
    weights[1] = weights[1] * known + total * added
    weights[2] = weights[2] * known * known + squares * added * added


@_loop
def add_weights(n: int, most: float, work: Float64, weights: Float64) -> None:
    """Add the weights ρ of n tokens; `most` is their largest d."""
    if abs(most) < _PLAIN_LIMIT:
        total, squares = _sums_of_weights(n, work)
        scale = math.exp(-most)
        add_scaled(weights, most, total * scale, squares * scale * scale)
        return
    total, squares = 0.0, 0.0
    for i in range(n):
        scaled = math.exp(work[D, i] - most)
        total += scaled
        squares += scaled * scaled
    add_scaled(weights, most, total, squares)


@_loop
def fill_buckets(values: Float64, edges: Float64, unknown: int, buckets: Int64) -> None:
    """Write the bucket of each value: the number of edges that are no larger; `unknown` if it is not finite."""
    for i in range(values.size):
        buckets[i] = 0
    for at in range(0, edges.size, 4):
        e0, e1, e2, e3 = edges[at], edges[at + 1], edges[at + 2], edges[at + 3]
        if e0 < math.inf:
            for i in range(values.size):
                x = values[i]
                buckets[i] += (x >= e0) + (x >= e1) + (x >= e2) + (x >= e3)
    for i in range(values.size):
        bucket = buckets[i]
        buckets[i] = bucket if abs(values[i]) < math.inf else unknown


@_loop
def fill_bins(n: int, grid: Int64, work: Float64, buckets: Int64) -> None:
    """Write the bin of each |d| on a grid (see `Layout`); the bins of positive d come after those of negative d."""
    dropped, first, last = grid[0], grid[1], grid[2]
    for i in range(n):
        bits, positive = np.float64(work[ABS_D, i]).view(np.int64), work[D, i] > 0.0
        place = min(max((bits >> dropped) - first, 0), last)
        buckets[i] = place + last + 1 if positive else place


# A column as (narrow, wide): float32 and float64, or int32 and int64. One is empty; both are if it was not logged.
Floats = tuple[NDArray[np.float32], Float64]
Integers = tuple[NDArray[np.int32], Int64]

BLOCK = 512
# Sums of this many blocks are added to the totals: two levels of sums lose fewer digits than one.
_BLOCKS_BETWEEN_FLUSHES = 16
# The counts of a rollout, in this order.
ENTROPY_TOKENS, ADVANTAGE_TOKENS = range(2)
# The places of conditions in Layout.edges; the last three have buckets of their own.
PROBABILITY, OF_ENTROPY, POSITION, TURN, LAG = range(5)


class Columns(NamedTuple):
    """The columns of the measured tokens of N rollouts, cut by `offsets` [N + 1]."""

    offsets: Int64
    target: Floats
    behaviour: Floats
    positions: Integers  # in their rollout; empty: consecutive
    entropy: Floats
    advantage: Floats
    turn: Integers
    lag: Integers
    rows_of_ids: Integers  # the row of each token's id in `Totals.token_ids`


# The buckets and the sums, as `_layout` and `new_totals` describe them.
Layout = namedtuple("Layout", "fine coarse first_region level_of_bin regions first edges entropies size gap")
Totals = namedtuple(
    "Totals",
    "sums counts ranges bad_updates largest_difference histogram recent bucket_sums tokens largest token_ids "
    "token_weights block work buckets integers",
)


def new_totals(rollouts: int, ids: int) -> Totals:
    """Return empty sums: of each of N rollouts, and over all of them.

    Even and odd tokens have separate buckets, because a sum must be stored before it is loaded again. The sums of some
    blocks are `recent` until they are added to `bucket_sums`.
    """
    buckets = _layout().size
    return Totals(
        sums=np.zeros((rollouts, len(TOKEN_SUMS))),
        counts=np.zeros((rollouts, 2), np.int64),
        ranges=np.full((rollouts, 2), np.nan),  # the least and the largest d
        bad_updates=np.zeros(1, np.int64),
        largest_difference=np.zeros(1),  # |π − μ|
        histogram=np.zeros(2 * LOG_RATIO_GRID.size + 1, np.int64),  # of negative and of positive d; the last: zeros
        recent=np.zeros((2, buckets, 4)),
        bucket_sums=np.zeros((buckets, 4)),
        tokens=np.zeros((2, buckets), np.int64),
        largest=np.zeros((2, buckets)),  # |d|
        token_ids=np.zeros((ids, 4)),  # tokens, Σ d, Σ |d|, Σ k3
        token_weights=np.array([-np.inf, 0.0, 0.0]),  # the largest log weight, and Σ w, Σ w² scaled as in LogWeights
        block=np.zeros(len(TOKEN_SUMS)),
        work=np.zeros((ROWS, BLOCK)),
        buckets=np.zeros(BLOCK, np.int64),
        integers=np.zeros(BLOCK, np.int64),
    )


@_loop
def _add_tokens(n: int, totals: Totals) -> None:
    """Add n tokens to their buckets."""
    work, buckets = totals.work, totals.buckets
    for i in range(n):
        # Unsigned, so that no index counts from the end.
        bank, bucket, abs_d = np.uint64(i & 1), np.uint64(buckets[i]), work[ABS_D, i]
        d, k3, difference = work[D, i], work[K3, i], work[DIFFERENCE, i]
        totals.recent[bank, bucket, 0] += abs_d
        totals.recent[bank, bucket, 1] += d
        totals.recent[bank, bucket, 2] += k3
        totals.recent[bank, bucket, 3] += difference
        totals.tokens[bank, bucket] += 1
        if abs_d > totals.largest[bank, bucket]:
            totals.largest[bank, bucket] = abs_d


@_loop
def _add_runs(n: int, condition: int, most: float, layout: Layout, totals: Totals) -> None:
    """Add n tokens to the buckets of their `integers`, one run of equal integers at a time.

    Integers rarely change: a run is mostly the whole block. `most` is the block's largest |d|.
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
            abs_d, d = sum_of(work[ABS_D, begin:end]), sum_of(work[D, begin:end])
            k3, difference = sum_of(work[K3, begin:end]), sum_of(work[DIFFERENCE, begin:end])
            largest = range_of(work[ABS_D, begin:end])[1]
        bucket, edges = layout.first[condition], layout.edges[condition]
        for edge in range(edges.size):
            bucket += values[begin] >= edges[edge]
        totals.recent[0, bucket, 0] += abs_d
        totals.recent[0, bucket, 1] += d
        totals.recent[0, bucket, 2] += k3
        totals.recent[0, bucket, 3] += difference
        totals.tokens[0, bucket] += end - begin
        totals.largest[0, bucket] = max(totals.largest[0, bucket], largest)
        begin = end


@_loop
def _add_grids(n: int, with_advantage: bool, layout: Layout, totals: Totals) -> None:
    """Add n tokens to the histogram of |d| and to the regions of d."""
    work, buckets, zeros = totals.work, totals.buckets, 0
    fill_bins(n, layout.fine, work, buckets)
    for i in range(n):
        totals.histogram[np.uint64(buckets[i])] += 1
    for i in range(n):
        zeros += work[ABS_D, i] == 0.0
    totals.histogram[0] -= zeros
    totals.histogram[2 * layout.fine[2] + 2] += zeros
    fill_bins(n, layout.coarse, work, buckets)
    bins = layout.coarse[2] + 1
    for i in range(n):
        abs_d, above, place = work[ABS_D, i], work[ABOVE, i], buckets[i]
        region = 0
        if place >= bins:
            place, region = place - bins, layout.regions
        region += layout.first_region[np.uint64(place)] + (abs_d > layout.level_of_bin[np.uint64(place)])
        bank, bucket = np.uint64(i & 1), np.uint64(region)
        totals.tokens[bank, bucket] += 1
        totals.recent[bank, bucket, 0] += above
        totals.recent[bank, bucket, 1] += above * above
        if with_advantage:
            totals.recent[bank, bucket, 2] += work[ADVANTAGE, i]
            totals.recent[bank, bucket, 3] += work[SKEW, i]


@_loop
def _add_token_ids(n: int, totals: Totals) -> None:
    """Add n tokens to the table by token id."""
    work, table, rows = totals.work, totals.token_ids, totals.integers
    for i in range(n):
        row = np.uint64(rows[i])
        d, abs_d, k3 = work[D, i], work[ABS_D, i], work[K3, i]
        table[row, 0] += 1.0
        table[row, 1] += d
        table[row, 2] += abs_d
        table[row, 3] += k3


@_loop
def _flush(totals: Totals) -> None:
    """Add the recent sums of all buckets to the totals, and reset them."""
    even, odd, sums = totals.recent[0].reshape(-1), totals.recent[1].reshape(-1), totals.bucket_sums.reshape(-1)
    for i in range(sums.size):
        sums[i] += even[i] + odd[i]
        even[i] = odd[i] = 0.0


@_loop
def _read(column: Any, at: int, values: Any) -> None:
    """Copy numbers of a column from token `at` on, as many as `values` has."""
    narrow, wide = column[0][at : at + values.size], column[1][at : at + values.size]
    for i in range(narrow.size):
        values[i] = narrow[i]
    for i in range(wide.size):
        values[i] = wide[i]


@_loop
def _add_block(columns: Columns, row: int, at: int, n: int, layout: Layout, totals: Totals) -> None:
    """Add n tokens to all totals except `sums` and the sums over ratios in `block`."""
    work, block, counts, before = totals.work, totals.block, totals.counts[row], at - columns.offsets[row]
    fill_probabilities(n, work)
    sum_probabilities(n, work, block)
    if before > 0:
        join_moments(before, n, totals.sums[row], block)
    with_advantage = columns.advantage[0].size + columns.advantage[1].size > 0
    if with_advantage:
        _read(columns.advantage, at, work[ADVANTAGE, :n])
        counts[ADVANTAGE_TOKENS] += sum_advantages(n, work, block)
        totals.bad_updates[0] += count_bad_updates(n, layout.gap, work)
    least, most = range_of(work[D, :n])
    furthest = max(-least, most)
    totals.ranges[row, 0], totals.ranges[row, 1] = (
        (min(totals.ranges[row, 0], least), max(totals.ranges[row, 1], most)) if before > 0 else (least, most)
    )
    totals.largest_difference[0] = max(totals.largest_difference[0], range_of(work[DIFFERENCE, :n])[1])
    add_weights(n, most, work, totals.token_weights)
    edges, buckets, of_entropy = layout.edges, totals.buckets, totals.integers
    fill_buckets(work[LOG_BEHAVIOUR, :n], edges[PROBABILITY], 0, buckets)
    if columns.entropy[0].size + columns.entropy[1].size > 0:
        _read(columns.entropy, at, work[ENTROPY, :n])
        counts[ENTROPY_TOKENS] += sum_entropies(n, work, block)
        fill_buckets(work[ENTROPY, :n], edges[OF_ENTROPY], layout.entropies, of_entropy)
    else:
        of_entropy[:n] = layout.entropies
    for i in range(n):
        buckets[i] = layout.first[PROBABILITY] + buckets[i] * (layout.entropies + 1) + of_entropy[i]
    _add_tokens(n, totals)
    if columns.positions[1].size > 0:
        _read(columns.positions, at, totals.integers[:n])
    else:
        for i in range(n):
            totals.integers[i] = before + i
    for i in range(n):
        # The exponent of the power of two at or below position + 1.
        totals.integers[i] = (np.float64(totals.integers[i] + 1).view(np.int64) >> 52) - 1023
    _add_runs(n, POSITION, furthest, layout, totals)
    if columns.lag[0].size + columns.lag[1].size > 0:
        _read(columns.lag, at, totals.integers[:n])
        _add_runs(n, LAG, furthest, layout, totals)
    if columns.turn[0].size + columns.turn[1].size > 0:
        _read(columns.turn, at, totals.integers[:n])
        _add_runs(n, TURN, furthest, layout, totals)
    _add_grids(n, with_advantage, layout, totals)
    if columns.rows_of_ids[0].size + columns.rows_of_ids[1].size > 0:
        _read(columns.rows_of_ids, at, totals.integers[:n])
        _add_token_ids(n, totals)


def _add_rollouts(columns: Columns, layout: Layout, totals: Totals, everything: bool) -> None:
    """Add all rollouts to `totals`; without `everything` only tokens and the sums of log-probs, d and ρ."""
    blocks = 0
    for row in range(columns.offsets.size - 1):
        stop = columns.offsets[row + 1]
        for at in range(columns.offsets[row], stop, BLOCK):
            n = min(BLOCK, stop - at)
            _read(columns.target, at, totals.work[LOG_TARGET, :n])
            _read(columns.behaviour, at, totals.work[LOG_BEHAVIOUR, :n])
            fill_ratios(n, totals.work)
            sum_ratios(n, totals.work, totals.block)
            if everything:
                _add_block(columns, row, at, n, layout, totals)
            for k in range(totals.block.size):
                totals.sums[row, k] += totals.block[k]
            blocks += 1
            if blocks == _BLOCKS_BETWEEN_FLUSHES:
                _flush(totals)
                blocks = 0
    _flush(totals)


_lock = threading.Lock()
_made: AddRollouts | None = None

# The conditions whose values change within a rollout, in the order of `Layout.edges`.
_CONDITIONS = ("probability", "entropy", "position", "turn", "lag")
# Up to this many rows per token a table with a row for each possible id is cheaper than sorting the ids.
_ROWS_PER_TOKEN = 32


def available() -> bool:
    """Return True if numba is installed."""
    return importlib.util.find_spec("numba") is not None


def is_prepared() -> bool:
    """Return True if `prepare()` has run in this process."""
    return _made is not None


def prepare() -> None:
    """Compile, or load the machine code of an earlier process. One machine code serves all batches.

    Without a writable folder for numba's cache, every process compiles. Raises ImportError without numba.
    """
    _machine_code()


def _machine_code() -> AddRollouts:
    global _made
    with _lock:
        if _made is None:
            try:
                _made = _compile(cached=True)
            except Exception:
                # numba has no writable folder, the disk is full, or a cached file is truncated: its reader then raises
                # exceptions of any type. Compile for this process only; an error in the loops is raised again.
                _made = _compile(cached=False)
        return _made


def _compile(*, cached: bool) -> AddRollouts:
    """Return the loops as machine code; the first call compiles, for types that all calls share."""
    import numba

    for function, options in _LOOPS:
        globals()[function.__name__] = numba.njit(**options)(function)
    made: AddRollouts = numba.njit(cache=cached, **_OPTIONS)(_add_rollouts)
    one = np.full(1, -1.0)
    columns = _columns(TokenInputs(one, one, np.array([0, 1])), None, None)
    made(columns, _layout(), new_totals(1, 0), True)
    return made


@functools.cache
def _layout() -> Layout:
    """Return the buckets: the regions of d, then those of probability × entropy, position, turn and lag.

    A grid is (bits of the mantissa that are dropped, first bin, last bin); see `BitGrid`. A token has one bucket for
    its probability and its entropy, so that its terms are added once; `sum_rollouts_compiled` sums the rows and the
    columns.
    """
    inner = [np.array(CONDITIONS[name].edges[1:-1]) for name in _CONDITIONS]
    # Edges of log μ, which the loops have read already.
    inner[0] = np.array([math.log(edge) for edge in inner[0]])
    # Edges of log₂(position + 1).
    inner[2] = np.log2(inner[2] + 1)
    edges = np.full((len(inner), -(-max(values.size for values in inner) // 4) * 4), math.inf)
    for row, values in zip(edges, inner, strict=True):
        row[: values.size] = values
    probabilities, entropies, *others = (CONDITIONS[name].size for name in _CONDITIONS)
    # Entropy has no buckets of its own.
    first = np.cumsum([2 * REGIONS, probabilities * (entropies + 1), 0, *others])
    return Layout(
        fine=_grid(LOG_RATIO_GRID),
        coarse=_grid(WEIGHT_GRID),
        first_region=FIRST_REGION,  # of each bin of the coarse grid
        level_of_bin=LEVEL_OF_BIN,
        regions=REGIONS,  # of each side
        first=first[:-1],  # the first bucket of each condition; that of probability × entropy at PROBABILITY
        edges=edges,  # edge i is the lower one of bucket i + 1; padded with ∞ to a multiple of 4
        entropies=entropies,  # and one more bucket of each probability, the last, for unknown entropies
        size=int(first[-1]),
        gap=DPPO_PROBABILITY_GAP,
    )


def _grid(grid: BitGrid) -> Int64:
    return np.array([52 - grid.bits, ((1023 + grid.lowest) << grid.bits) - 1, grid.size - 1])


def sum_rollouts_compiled(inputs: TokenInputs) -> RolloutSums:
    """Return the sums of each rollout and of all rollouts together, as `sum_rollouts_numpy` does.

    Integers, extremes and largest values equal numpy's; float sums agree to 1e-12 of the sum of absolute values. Raises
    ImportError without numba.
    """
    add, layout = _machine_code(), _layout()
    measured, positions, result = measured_tokens(inputs)
    ids, rows = _table_of_ids(measured.token_ids)
    totals = new_totals(measured.offsets.size - 1, ids.size)
    add(_columns(measured, positions, rows), layout, totals, True)
    bucket_tokens, largest = totals.tokens.sum(axis=0), totals.largest.max(axis=0)
    found = np.flatnonzero(totals.token_ids[:, 0])
    of_ids = totals.token_ids[found]
    result.sums = totals.sums
    result.min_d, result.max_d = totals.ranges.T
    result.entropy_tokens, result.advantage_tokens = totals.counts.T.copy()
    result.zero_tokens, result.bad_updates = int(totals.histogram[-1]), int(totals.bad_updates[0])
    result.max_probability_difference = float(totals.largest_difference[0])
    result.histogram = totals.histogram[:-1].reshape(2, -1)
    result.region_tokens = bucket_tokens[: 2 * REGIONS].reshape(2, -1)
    result.region_sums = totals.bucket_sums[: 2 * REGIONS].reshape(2, REGIONS, -1)
    result.token_ids = TokenIdSums(ids[found], of_ids[:, 0].astype(np.int64), of_ids[:, 1:], np.zeros(found.size))
    result.token_weights = LogWeights.from_array(int(result.tokens.sum()), totals.token_weights)
    add_largest_and_turns(result, measured)
    for name, first in zip(_CONDITIONS[2:], layout.first[2:].tolist(), strict=True):
        own = slice(first, first + CONDITIONS[name].size)
        result.conditions[name] = BucketSums(bucket_tokens[own], totals.bucket_sums[own], largest[own])
    both, of_both = slice(*layout.first[:2]), (-1, layout.entropies + 1)
    tokens_of_both, largest_of_both = bucket_tokens[both].reshape(of_both), largest[both].reshape(of_both)
    sums_of_both = totals.bucket_sums[both].reshape(*of_both, 4)
    # Sum each row for the probability, and each column but the last (unknown entropy) for the entropy.
    for name, axis in (("probability", 1), ("entropy", 0)):
        own = slice(CONDITIONS[name].size)
        result.conditions[name] = BucketSums(
            tokens_of_both.sum(axis)[own], sums_of_both.sum(axis)[own], largest_of_both.max(axis)[own]
        )
    result.conditions["length"] = result.sums_by_length()
    return result


def _columns(
    inputs: TokenInputs, positions: NDArray[np.integer] | None, rows_of_ids: NDArray[np.integer] | None
) -> Columns:
    """Return the columns of the loops; those that are contiguous and of a supported type are not copied."""
    return Columns(
        offsets=_read_only(inputs.offsets, np.int64),
        target=_floats(inputs.target),
        behaviour=_floats(inputs.behaviour),
        positions=_integers(positions),
        entropy=_floats(inputs.entropy),
        advantage=_floats(inputs.advantage),
        turn=_integers(inputs.turn),
        lag=_integers(inputs.lag),
        rows_of_ids=_integers(rows_of_ids),
    )


def _floats(values: NDArray[np.floating] | None) -> Floats:
    """Return a column as (float32, float64), one of which is empty."""
    if values is None:
        return _NO_FLOATS
    if values.dtype in (np.float16, np.float32):
        return _read_only(values, np.float32), _NO_FLOATS[1]
    return _NO_FLOATS[0], _read_only(values, np.float64)


def _integers(values: NDArray[np.integer] | None) -> Integers:
    """Return a column as (int32, int64), one of which is empty."""
    if values is None:
        return _NO_INTEGERS
    if values.dtype in (np.int16, np.int32):
        return _read_only(values, np.int32), _NO_INTEGERS[1]
    return _NO_INTEGERS[0], _read_only(values, np.int64)


def _read_only(values: NDArray[Any], dtype: type[Scalar]) -> NDArray[Scalar]:
    """Return a contiguous read-only array of this type; to numba a writable array is of another type."""
    view = np.ascontiguousarray(values, dtype).view()
    view.flags.writeable = False
    return view


_NO_FLOATS = _read_only(np.zeros(0), np.float32), _read_only(np.zeros(0), np.float64)
_NO_INTEGERS = _read_only(np.zeros(0), np.int32), _read_only(np.zeros(0), np.int64)


def _table_of_ids(token_ids: NDArray[np.integer] | None) -> tuple[Int64, NDArray[np.integer] | None]:
    """Return the ids of the rows of a table, ascending, and the row of each token's id."""
    if token_ids is None or token_ids.size == 0:
        return np.zeros(0, np.int64), None
    most = int(token_ids.max())
    if int(token_ids.min()) >= 0 and most < token_ids.size * _ROWS_PER_TOKEN:
        return np.arange(most + 1), token_ids
    ids, rows = np.unique(token_ids, return_inverse=True)
    return ids.astype(np.int64), rows
