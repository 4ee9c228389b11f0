"""The loops of the compiled pass, for numba: the only module that imports it when it is imported itself.

A rollout is summed a block of tokens at a time, in loops that the compiler can vectorise. One machine code serves all
batches: columns are float64, and one that was not logged is empty. All of it is in this file, because numba's cache on
disk detects no edits of other files.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import numba
import numpy as np
from numpy.typing import NDArray

__all__ = ["ENTRY_OPTIONS", "SUMS", "Layout", "Totals", "add_rollouts", "new_totals"]

Float64 = NDArray[np.float64]
Int64 = NDArray[np.int64]
ENTRY_OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy", "fastmath": {"contract"}}
_Loop = TypeVar("_Loop", bound=Callable[..., Any])
_compiled: Callable[[_Loop], _Loop] = numba.njit(**ENTRY_OPTIONS)
# Vectorised sums and fused multiply-adds; NaN and infinity as IEEE 754 has them.
_reduction: Callable[[_Loop], _Loop] = numba.njit(nogil=True, error_model="numpy", fastmath={"reassoc", "contract"})

BLOCK = 512
_BLOCKS_BETWEEN_FLUSHES = 16  # of plain sums into compensated sums

# The sums of a rollout, in this order.
SUMS = (
    "d", "abs_d", "d2", "k3_kl", "ratio_minus_one", "chi2_token", "reverse_chi2_token", "tv_token",
    "prob_error_minus_one", "log_target", "log_behaviour", "target_probability", "behaviour_probability",
    "abs_probability_difference", "within_target", "within_behaviour", "within_product", "within_difference", "entropy",
    "surprisal", "advantage", "advantage2", "advantage_d", "positive_advantage_skew", "negative_advantage_skew",
    "d_with_advantage",
)  # fmt: skip

# Rows of `work`, [ROWS, BLOCK]. GROWTH is exp|d| − 1, SHRINKAGE 1 − exp(−|d|), DECAY exp(−|d|), ABOVE ρ − 1; TARGET and
# BEHAVIOUR are probabilities; SKEW is A·(ρ − 1).
D, ABS_D, GROWTH, SHRINKAGE, DECAY, ABOVE, K3, TARGET, BEHAVIOUR, DIFFERENCE, ADVANTAGE, SKEW = range(12)
ROWS = 12


class Layout(NamedTuple):
    """The buckets: those of the weights' grid, of the tails, and of each condition, one after the other.

    A grid is (bits of the mantissa that are dropped, first bin, last bin); see `BitGrid`.
    """

    fine: Int64
    coarse: Int64
    levels: Float64  # of tails, rising
    first_tail: int
    first: Int64  # [K]: the first bucket of each condition
    edges: Float64  # [K, E]: edge i is the lower one of bucket i + 1; padded with ∞ to a multiple of 4
    unknown: int  # the bucket of tokens whose value is unknown, the last


class Totals(NamedTuple):
    """The sums over all rollouts. A bucket's plain sums are flushed into the compensated pairs `high` and `low`."""

    histogram: Int64  # [2 × fine + 1]: of negative and of positive d; the last counts zeros
    plain: Float64  # [B, 4]
    high: Float64
    low: Float64
    tokens: Int64  # [B]
    largest: Float64  # [B]: |d|
    token_ids: Float64  # [V, 4]: tokens, Σ d, Σ |d|, Σ k3
    largest_difference: Float64  # [1]: |π − μ|
    block: Float64  # [SUMS]
    work: Float64
    buckets: Int64  # [BLOCK]


def new_totals(bins: int, buckets: int, ids: int) -> Totals:
    """Return empty sums."""
    return Totals(
        histogram=np.zeros(2 * bins + 1, np.int64),
        plain=np.zeros((buckets, 4)),
        high=np.zeros((buckets, 4)),
        low=np.zeros((buckets, 4)),
        tokens=np.zeros(buckets, np.int64),
        largest=np.zeros(buckets),
        token_ids=np.zeros((ids, 4)),
        largest_difference=np.zeros(1),
        block=np.zeros(len(SUMS)),
        work=np.zeros((ROWS, BLOCK)),
        buckets=np.zeros(BLOCK, np.int64),
    )


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
# Below this e^x is smaller than the smallest normal number, and taken as 0.
_UNDERFLOWS = -707.0
# Replaces infinity where ∞·0 would follow.
_HUGE = 1e300
# Below this k is 0, so that the polynomial alone is e^x − 1 − x.
_HALF_LN2 = 0.34
_C = tuple(1.0 / math.factorial(power) for power in range(2, 14))


@_compiled
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


@_compiled
def fill_ratios(target: Float64, behaviour: Float64, work: Float64) -> None:
    """Compute d, |d| and the terms of e^|d| of a block of log-probs."""
    for i in range(target.size):
        d = target[i] - behaviour[i]
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


@_compiled
def fill_probabilities(target: Float64, behaviour: Float64, work: Float64) -> None:
    """Compute π, μ and |π − μ| of a block from one exponential, that of the larger probability."""
    for i in range(target.size):
        # All loads come before the selects: a load that depends on a select is not vectorised.
        log_target, log_behaviour, lower = target[i], behaviour[i], work[D, i] < 0.0
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
def _sum_ratios(target: Float64, behaviour: Float64, work: Float64, block: Float64) -> None:
    """Sum the log-probs and the terms of d and ρ."""
    d_sum, abs_d, d2, k3, log_target, log_behaviour = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
    for i in range(target.size):
        d = work[D, i]
        d_sum += d
        abs_d += work[ABS_D, i]
        d2 += d * d
        k3 += work[K3, i]
        log_target += target[i]
        log_behaviour += behaviour[i]
    above_sum, chi2, tv, growth_sum, reverse = 0.0, 0.0, 0.0, 0.0, 0.0
    for i in range(target.size):
        above, growth = work[ABOVE, i], work[GROWTH, i]
        above_sum += above
        chi2 += above * above
        tv += -above if above < 0.0 else 0.0
        growth_sum += growth
        reverse += growth * work[SHRINKAGE, i]
    block[0], block[1], block[2], block[3], block[4], block[5] = d_sum, abs_d, d2, k3, above_sum, chi2
    block[6], block[7], block[8], block[9], block[10] = reverse, tv, growth_sum, log_target, log_behaviour


@_reduction
def _sum_probabilities(n: int, work: Float64, block: Float64) -> None:
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


@_compiled
def _join_moments(before: int, n: int, sums: Float64, block: Float64) -> None:
    """Add to the block's moments what lies between its means and those of the rollout's `before` earlier tokens.

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
def _sum_entropies(behaviour: Float64, entropy: Float64, block: Float64) -> None:
    """Sum H and −log μ − H over the tokens with a finite entropy H."""
    entropies, surprisals = 0.0, 0.0
    for i in range(entropy.size):
        known = abs(entropy[i]) < math.inf
        entropies += entropy[i] if known else 0.0
        surprisals += -behaviour[i] - entropy[i] if known else 0.0
    block[18], block[19] = entropies, surprisals


@_reduction
def _sum_advantages(advantage: Float64, work: Float64, block: Float64) -> None:
    """Fill ADVANTAGE, 0 if not finite, and SKEW, 0 if A is 0, also where ρ is infinite; sum the terms of A."""
    advantages, squares, products, of_d = 0.0, 0.0, 0.0, 0.0
    for i in range(advantage.size):
        known, d = abs(advantage[i]) < math.inf, work[D, i]
        value = advantage[i] if known else 0.0
        product = value * work[ABOVE, i]
        work[ADVANTAGE, i] = value
        work[SKEW, i] = product if value != 0.0 else 0.0
        advantages += value
        squares += value * value
        products += value * d
        of_d += d if known else 0.0
    positive, negative = 0.0, 0.0
    for i in range(advantage.size):
        skew = work[SKEW, i]
        positive += skew if work[ADVANTAGE, i] > 0.0 else 0.0
        negative += skew if work[ADVANTAGE, i] < 0.0 else 0.0
    block[20], block[21], block[22], block[23], block[24], block[25] = (
        advantages, squares, products, positive, negative, of_d,
    )  # fmt: skip


@_compiled
def _largest(n: int, row: int, work: Float64) -> float:
    """Return the largest of n values, which are not NaN and not negative."""
    most = 0.0
    for i in range(n):
        if work[row, i] > most:
            most = work[row, i]
    return most


@_compiled
def _are_in_one_bucket(values: Float64, edges: Float64, bucket: int) -> bool:
    """Return True if all values lie in this bucket of a condition; NaN lies in none."""
    low = edges[bucket - 1] if bucket > 0 else -math.inf
    high = edges[bucket] if bucket < edges.size else math.inf
    inside = 0
    for i in range(values.size):
        inside += 1 if low <= values[i] < high else 0
    return inside == values.size


@_compiled
def _fill_buckets(values: Float64, edges: Float64, first: int, unknown: int, buckets: Int64) -> None:
    """Write the bucket of each value: `first` + the number of edges that are no larger; `unknown` if not finite."""
    for i in range(values.size):
        buckets[i] = first
    for at in range(0, edges.size, 4):
        e0, e1, e2, e3 = edges[at], edges[at + 1], edges[at + 2], edges[at + 3]
        if e0 < math.inf:
            for i in range(values.size):
                x = values[i]
                buckets[i] += (x >= e0) + (x >= e1) + (x >= e2) + (x >= e3)
    for i in range(values.size):
        bucket = buckets[i]
        buckets[i] = bucket if abs(values[i]) < math.inf else unknown


@_compiled
def _add_condition(values: Float64, edges: Float64, first: int, unknown: int, most: float, totals: Totals) -> None:
    """Add a block to the buckets of a condition; `most` is its largest |d|. Most blocks lie in one bucket."""
    work, block, plain, buckets = totals.work, totals.block, totals.plain, totals.buckets
    place = np.searchsorted(edges, values[0], side="right")
    if _are_in_one_bucket(values, edges, place):
        bucket = first + place
        plain[bucket, 0] += block[1]
        plain[bucket, 1] += block[0]
        plain[bucket, 2] += block[3]
        plain[bucket, 3] += block[13]
        totals.tokens[bucket] += values.size
        totals.largest[bucket] = max(totals.largest[bucket], most)
        return
    _fill_buckets(values, edges, first, unknown, buckets)
    for i in range(values.size):
        bucket, abs_d = buckets[i], work[ABS_D, i]
        plain[bucket, 0] += abs_d
        plain[bucket, 1] += work[D, i]
        plain[bucket, 2] += work[K3, i]
        plain[bucket, 3] += work[DIFFERENCE, i]
        totals.tokens[bucket] += 1
        if abs_d > totals.largest[bucket]:
            totals.largest[bucket] = abs_d


@_compiled
def _bin(bits: np.int64, grid: Int64) -> int:
    """Return the bin of a positive float64, given by its bits, on a grid of Layout."""
    place: int = min(max((bits >> grid[0]) - grid[1], 0), grid[2])
    return place


@_compiled
def _add_grids(n: int, with_advantage: bool, layout: Layout, totals: Totals) -> None:
    """Add a block to the histogram of |d| and to the sums of importance weights."""
    work, size = totals.work, layout.fine[2] + 1
    for i in range(n):
        bits = np.float64(work[ABS_D, i]).view(np.int64)
        above, positive = work[ABOVE, i], work[D, i] > 0.0
        fine = _bin(bits, layout.fine) + (size if positive else 0)
        totals.histogram[2 * size if bits == 0 else fine] += 1
        bucket = _bin(bits, layout.coarse) + (layout.coarse[2] + 1 if positive else 0)
        totals.plain[bucket, 0] += above
        totals.plain[bucket, 1] += above * above
        if with_advantage:
            totals.plain[bucket, 2] += work[ADVANTAGE, i]
            totals.plain[bucket, 3] += work[SKEW, i]


@_compiled
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
        totals.tokens[bucket] += 1
        totals.plain[bucket, 0] += above
        totals.plain[bucket, 1] += above * above
        if with_advantage:
            totals.plain[bucket, 2] += work[ADVANTAGE, i]
            totals.plain[bucket, 3] += work[SKEW, i]


@_compiled
def _add_token_ids(rows: Int64, totals: Totals) -> None:
    """Add a block to the table by token id; `rows` are the tokens' rows there."""
    work, table = totals.work, totals.token_ids
    for i in range(rows.size):
        row = rows[i]
        table[row, 0] += 1.0
        table[row, 1] += work[D, i]
        table[row, 2] += work[ABS_D, i]
        table[row, 3] += work[K3, i]


@_compiled
def _flush(totals: Totals) -> None:
    """Add the plain sums of all buckets to their compensated pairs, and reset them."""
    plain, high, low = totals.plain.reshape(-1), totals.high.reshape(-1), totals.low.reshape(-1)
    for i in range(plain.size):
        value, before = plain[i], high[i]
        total = before + value
        of_value = total - before
        lost = (before - (total - of_value)) + (value - of_value)
        high[i] = total
        # Keeps an infinite sum infinite: the low part of one would be NaN.
        low[i] += lost if lost - lost == 0.0 else 0.0
        plain[i] = 0.0


def add_rollouts(
    offsets: Int64,
    columns: tuple[Float64, Float64, Float64, Float64],
    conditions: tuple[Float64, ...],
    token_rows: Int64,
    layout: Layout,
    totals: Totals,
    sums: Float64,
    everything: bool,
) -> None:
    """Add the tokens of R rollouts cut by `offsets`: to `sums` [R, len(SUMS)], and to `totals` if `everything`.

    `columns` are log π, log μ, entropy and advantage, `conditions` the values of each condition of the layout, each [T]
    or empty; `token_rows` are rows of `totals.token_ids`. Without `everything` only log π and log μ are used, and only
    their sums and those of ρ are filled.
    """
    target, behaviour, entropy, advantage = columns
    work, block, with_advantage = totals.work, totals.block, advantage.size > 0
    blocks = 0
    for row in range(offsets.size - 1):
        for at in range(offsets[row], offsets[row + 1], BLOCK):
            end = min(at + BLOCK, offsets[row + 1])
            n = end - at
            fill_ratios(target[at:end], behaviour[at:end], work)
            _sum_ratios(target[at:end], behaviour[at:end], work, block)
            if everything:
                fill_probabilities(target[at:end], behaviour[at:end], work)
                _sum_probabilities(n, work, block)
                if at > offsets[row]:
                    _join_moments(at - offsets[row], n, sums[row], block)
                if entropy.size > 0:
                    _sum_entropies(behaviour[at:end], entropy[at:end], block)
                if with_advantage:
                    _sum_advantages(advantage[at:end], work, block)
                most = _largest(n, ABS_D, work)
                totals.largest_difference[0] = max(totals.largest_difference[0], _largest(n, DIFFERENCE, work))
                for k in range(len(conditions)):
                    if conditions[k].size > 0:
                        values = conditions[k][at:end]
                        _add_condition(values, layout.edges[k], layout.first[k], layout.unknown, most, totals)
                _add_grids(n, with_advantage, layout, totals)
                if most > layout.levels[0]:
                    _add_tails(n, with_advantage, layout, totals)
                if token_rows.size > 0:
                    _add_token_ids(token_rows[at:end], totals)
            for k in range(block.size):
                sums[row, k] += block[k]
            blocks += 1
            if blocks == _BLOCKS_BETWEEN_FLUSHES:
                _flush(totals)
                blocks = 0
    _flush(totals)
