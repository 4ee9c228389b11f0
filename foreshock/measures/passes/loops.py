"""The loops of the compiled pass, which add a rollout in blocks of tokens. One machine code serves all batches.

First the terms of each token of a block, and their sums over the block: the rows of `work` [ROWS, BLOCK] hold the
terms, `block` [TOKEN_SUMS] their sums, and LLVM can vectorise the loops. Then the sums of rollouts and of buckets.
Importing this module imports numba.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import numba
import numpy as np
from numpy.typing import NDArray

from foreshock.measures.statistics.rollout_sums import DPPO_PROBABILITY_GAP, TOKEN_SUMS
from foreshock.measures.statistics.tails import LARGEST_VALUES

Float64 = NDArray[np.float64]
Int64 = NDArray[np.int64]
# No reference counting (`_nrt`): the caller holds all arrays.
OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy", "fastmath": {"contract"}, "_nrt": False}
_Loop = TypeVar("_Loop", bound=Callable[..., Any])
compiled: Callable[[_Loop], _Loop] = numba.njit(**OPTIONS)
# No wrappers for calls from Python: for many arrays they take most of the compile time.
inner: Callable[[_Loop], _Loop] = numba.njit(no_cpython_wrapper=True, no_cfunc_wrapper=True, **OPTIONS)
# Vectorised sums and fused multiply-adds; NaN and infinity follow IEEE 754.
reduction: Callable[[_Loop], _Loop] = numba.njit(**(OPTIONS | {"fastmath": {"reassoc", "contract"}}))

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


@compiled
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


@compiled
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


@compiled
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


@reduction
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


@reduction
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


@compiled
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


@reduction
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


@reduction
def sum_advantages(n: int, work: Float64, block: Float64) -> int:
    """Sum the terms of A; return the number of finite A.

    Set ADVANTAGE to 0 if A is not finite, and SKEW to 0 if A is 0, even if ρ is infinite.
    """
    advantages, squares, products, of_d, count = 0.0, 0.0, 0.0, 0.0, 0
    for i in range(n):
        advantage, d, above = work[ADVANTAGE, i], work[D, i], work[ABOVE, i]
        known = abs(advantage) < math.inf
        value = advantage if known else 0.0
        product = value * above
        work[ADVANTAGE, i] = value
        work[SKEW, i] = product if value != 0.0 else 0.0
        advantages += value
        squares += value * value
        products += value * d
        of_d += d if known else 0.0
        count += known
    positive, negative = 0.0, 0.0
    for i in range(n):
        skew = work[SKEW, i]
        positive += skew if work[ADVANTAGE, i] > 0.0 else 0.0
        negative += skew if work[ADVANTAGE, i] < 0.0 else 0.0
    block[20], block[21], block[22], block[23], block[24], block[25] = (
        advantages, squares, products, positive, negative, of_d,
    )  # fmt: skip
    return count


@compiled
def count_bad_updates(n: int, work: Float64) -> int:
    """Return the number of tokens with A < 0 and μ − π ≥ DPPO_PROBABILITY_GAP."""
    bad, close = 0, 0
    for i in range(n):
        difference, lost = work[DIFFERENCE, i], (work[ADVANTAGE, i] < 0.0) & (work[D, i] < 0.0)
        bad += lost & (difference >= DPPO_PROBABILITY_GAP)
        close += lost & (abs(difference - DPPO_PROBABILITY_GAP) < 1e-12)
    if close == 0:
        return bad
    bad = 0
    for i in range(n):  # again, with the C library's functions, as in numpy
        lost = (work[ADVANTAGE, i] < 0.0) & (work[D, i] < 0.0)
        bad += lost and math.exp(work[LOG_BEHAVIOUR, i]) * -math.expm1(work[D, i]) >= DPPO_PROBABILITY_GAP
    return bad


@compiled
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


@compiled
def _float_of(key: int) -> float:
    """Return the float of a key of `range_of`."""
    value: float = np.int64(key ^ ((key >> 63) & _MAGNITUDE)).view(np.float64)
    return value


@reduction
def sum_of(values: Float64) -> float:
    """Return the sum."""
    total = 0.0
    for i in range(values.size):
        total += values[i]
    return total


@reduction
def _sums_of_weights(n: int, work: Float64) -> tuple[float, float]:
    """Return Σρ and Σρ², without cancellation for small ρ."""
    total, squares = 0.0, 0.0
    for i in range(n):
        growth, decay, positive = work[GROWTH, i], work[DECAY, i], work[D, i] > 0.0
        ratio = 1.0 + growth if positive else decay
        total += ratio
        squares += ratio * ratio
    return total, squares


@compiled
def add_scaled(weights: Float64, largest: float, total: float, squares: float) -> None:
    """Add weights with the sum total·e^largest and the sum of squares squares·e^(2·largest) to a row of `weights`."""
    most = max(weights[0], largest)
    known, added = math.exp(weights[0] - most), math.exp(largest - most)
    weights[0] = most
    weights[1] = weights[1] * known + total * added
    weights[2] = weights[2] * known * known + squares * added * added


@compiled
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


@compiled
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


@compiled
def fill_bins(n: int, grid: Int64, work: Float64, buckets: Int64) -> None:
    """Write the bin of each |d| on a grid (see `Layout`); the bins of positive d come after those of negative d."""
    dropped, first, last = grid[0], grid[1], grid[2]
    for i in range(n):
        bits, positive = np.float64(work[ABS_D, i]).view(np.int64), work[D, i] > 0.0
        place = min(max((bits >> dropped) - first, 0), last)
        buckets[i] = place + last + 1 if positive else place


@compiled
def move_largest_first(values: Float64, count: int) -> None:
    """Reorder so that the `count` largest come first (Hoare's selection); none is NaN."""
    first, last = 0, values.size - 1
    while first < last:
        pivot = values[(first + last) // 2]
        left, right = first, last
        while left <= right:
            while values[left] > pivot:
                left += 1
            while values[right] < pivot:
                right -= 1
            if left <= right:
                values[left], values[right] = values[right], values[left]
                left += 1
                right -= 1
        if right >= count - 1:
            last = right
        elif left <= count - 1:
            first = left
        else:
            return


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
        work=np.zeros((ROWS, BLOCK)),
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
        value = sign * work[D, i]
        if value > floor:
            values[kept] = value
            kept += 1
    if kept > _BUFFER - BLOCK:
        move_largest_first(values[:kept], LARGEST_VALUES)
        kept, totals.floors[side] = LARGEST_VALUES, range_of(values[:LARGEST_VALUES])[0]
    totals.kept[side] = kept


@inner
def _add_tokens(n: int, totals: Totals) -> None:
    """Add n tokens to their buckets."""
    work, buckets = totals.work, totals.buckets
    for i in range(n):
        # Unsigned, so that no index counts from the end.
        bank, bucket, abs_d = np.uint64(i & 1), np.uint64(buckets[i]), work[ABS_D, i]
        d, k3, difference = work[D, i], work[K3, i], work[DIFFERENCE, i]
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
            abs_d, d = sum_of(work[ABS_D, begin:end]), sum_of(work[D, begin:end])
            k3, difference = sum_of(work[K3, begin:end]), sum_of(work[DIFFERENCE, begin:end])
            largest = range_of(work[ABS_D, begin:end])[1]
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
        add_scaled(totals.turn_weights, totals.turn_d[0], 1.0, 1.0)
    if is_first or turn != totals.turn[0]:
        totals.turn[0], totals.turn_d[0] = turn, 0.0
        totals.turn[1] += 1
    totals.turn_d[0] += d


@inner
def _add_grids(n: int, with_advantage: bool, layout: Layout, totals: Totals) -> None:
    """Add n tokens to the histogram of |d| and to the sums of importance weights."""
    work, buckets, zeros = totals.work, totals.buckets, 0
    fill_bins(n, layout.fine, work, buckets)
    for i in range(n):
        totals.histogram[np.uint64(buckets[i])] += 1
    for i in range(n):
        zeros += work[ABS_D, i] == 0.0
    totals.histogram[0] -= zeros
    totals.histogram[2 * layout.fine[2] + 2] += zeros
    fill_bins(n, layout.coarse, work, buckets)
    for i in range(n):
        bank, bucket, above = np.uint64(i & 1), np.uint64(buckets[i]), work[ABOVE, i]
        totals.plain[bank, bucket, 0] += above
        totals.plain[bank, bucket, 1] += above * above
        if with_advantage:
            totals.plain[bank, bucket, 2] += work[ADVANTAGE, i]
            totals.plain[bank, bucket, 3] += work[SKEW, i]


@inner
def _add_tails(n: int, with_advantage: bool, layout: Layout, totals: Totals) -> None:
    """Add each token beyond the first level to the bucket of the last level that it exceeds."""
    work, levels = totals.work, layout.levels
    for i in range(n):
        abs_d = work[ABS_D, i]
        if abs_d <= levels[0]:
            continue
        beyond = 0
        while beyond + 1 < levels.size and abs_d > levels[beyond + 1]:
            beyond += 1
        bucket = layout.first_tail + beyond + (levels.size if work[D, i] > 0.0 else 0)
        above = work[ABOVE, i]
        totals.tokens[0, bucket] += 1
        totals.plain[0, bucket, 0] += above
        totals.plain[0, bucket, 1] += above * above
        if with_advantage:
            totals.plain[0, bucket, 2] += work[ADVANTAGE, i]
            totals.plain[0, bucket, 3] += work[SKEW, i]


@inner
def _add_token_ids(n: int, rows: Int64, totals: Totals) -> None:
    """Add n tokens to the table by token id; `rows` are those of the ids, or empty."""
    work, table, ids = totals.work, totals.token_ids, totals.integers
    for i in range(n):
        row = np.uint64(ids[i] if rows.size == 0 else rows[np.uint64(ids[i])])
        d, abs_d, k3 = work[D, i], work[ABS_D, i], work[K3, i]
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
    target, behaviour, places = totals.work[LOG_TARGET], totals.work[LOG_BEHAVIOUR], totals.places
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
    fill_probabilities(measured, work)
    sum_probabilities(measured, work, block)
    if before > 0:
        join_moments(before, measured, totals.sums[row], block)
    with_advantage = columns.advantage[0].size + columns.advantage[1].size > 0
    if with_advantage:
        if columns.advantage_of_rollout:
            _read(columns.advantage, row, 1, 1, places, work[ADVANTAGE])
            for i in range(1, measured):
                work[ADVANTAGE, i] = work[ADVANTAGE, 0]
        else:
            _read(columns.advantage, at, n, measured, places, work[ADVANTAGE])
        counts[ADVANTAGE_TOKENS] += sum_advantages(measured, work, block)
        totals.bad_updates[0] += count_bad_updates(measured, work)
    least, most = range_of(work[D, :measured])
    furthest = max(-least, most)
    totals.ranges[row, 0], totals.ranges[row, 1] = (
        (min(totals.ranges[row, 0], least), max(totals.ranges[row, 1], most)) if before > 0 else (least, most)
    )
    difference = range_of(work[DIFFERENCE, :measured])[1]
    totals.largest_difference[0] = max(totals.largest_difference[0], difference)
    add_weights(measured, most, work, totals.token_weights)
    _keep_largest(measured, 0, -least, totals)
    _keep_largest(measured, 1, most, totals)
    edges, buckets, of_entropy = layout.edges, totals.buckets, totals.integers
    fill_buckets(work[LOG_BEHAVIOUR, :measured], edges[PROBABILITY], 0, buckets)
    if columns.entropy[0].size + columns.entropy[1].size > 0:
        _read(columns.entropy, at, n, measured, places, work[ENTROPY])
        counts[ENTROPY_TOKENS] += sum_entropies(measured, work, block)
        fill_buckets(work[ENTROPY, :measured], edges[OF_ENTROPY], layout.entropies, of_entropy)
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


def entry(constants: int) -> Callable[[Columns, Layout, Totals, bool], int]:
    """Return the function to compile, which returns `constants`, a digest of those from other files.

    numba's cache detects edits of this file and a change of `constants`.
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
                fill_ratios(measured, totals.work)
                sum_ratios(measured, totals.work, totals.block)
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
                add_scaled(totals.turn_weights, totals.turn_d[0], 1.0, 1.0)
                totals.counts[row, TURNS], totals.turn[1] = totals.turn[1], 0
        _flush(totals)
        return constants

    return add_rollouts
