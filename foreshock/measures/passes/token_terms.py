"""The terms of each token of a block, and their sums over the block: loops for numba that LLVM can vectorise.

Importing this module imports numba. The rows of `work` [ROWS, BLOCK] hold the terms; `block` [TOKEN_SUMS] their sums.
"""

import math
from collections.abc import Callable
from typing import Any, TypeVar

import numba
import numpy as np
from numpy.typing import NDArray

from foreshock.measures.statistics.rollout_sums import DPPO_PROBABILITY_GAP

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
