"""Sums over the tokens of a chunk, written to `totals` [SUMS] in the order of TOKEN_SUMS.

Each loop does a few vector additions on rows that fit into the first-level cache.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from foreshock.measures.passes.compiled import array_layout as layout
from foreshock.measures.passes.compiled.chunk_reader import is_finite
from foreshock.measures.passes.compiled.intrinsics import larger, smaller
from foreshock.measures.passes.compiled.jit import compiled, reduction

__all__ = [
    "count_bad_updates",
    "largest_of_row",
    "range_of_row",
    "squares_about_means",
    "sum_advantages",
    "sum_entropies",
    "sum_log_probs",
    "sum_probabilities",
    "sum_ratios",
    "sums_of_weights",
]

Float64 = NDArray[np.float64]


@reduction
def sum_ratios(work: Float64, n: int, totals: Float64) -> None:
    """Sum the terms of d and ρ."""
    total_d, total_abs_d, total_d2, total_k3 = 0.0, 0.0, 0.0, 0.0
    for i in range(n):
        d = work[layout.D, i]
        total_d += d
        total_abs_d += work[layout.ABS_D, i]
        total_d2 += d * d
        total_k3 += work[layout.K3, i]
    total_above, total_chi2, total_tv, total_growth, total_reverse = 0.0, 0.0, 0.0, 0.0, 0.0
    for i in range(n):
        above, growth = work[layout.RATIO_MINUS_ONE, i], work[layout.GROWTH, i]
        total_above += above
        total_chi2 += above * above
        total_tv += -above if above < 0.0 else 0.0
        total_growth += growth
        total_reverse += growth * work[layout.SHRINKAGE, i]
    totals[layout.SUM_D] = total_d
    totals[layout.SUM_ABS_D] = total_abs_d
    totals[layout.SUM_D2] = total_d2
    totals[layout.SUM_K3] = total_k3
    totals[layout.SUM_RATIO_MINUS_ONE] = total_above
    totals[layout.SUM_CHI2] = total_chi2
    totals[layout.SUM_TV] = total_tv
    totals[layout.SUM_GROWTH] = total_growth
    totals[layout.SUM_REVERSE_CHI2] = total_reverse


@reduction
def sum_log_probs(work: Float64, n: int, totals: Float64) -> None:
    """Sum log π and log μ."""
    log_target, log_behaviour = 0.0, 0.0
    for i in range(n):
        log_target += work[layout.LOG_TARGET, i]
        log_behaviour += work[layout.LOG_BEHAVIOUR, i]
    totals[layout.SUM_LOG_TARGET] = log_target
    totals[layout.SUM_LOG_BEHAVIOUR] = log_behaviour


@reduction
def sum_probabilities(work: Float64, n: int, totals: Float64) -> None:
    """Sum π, μ and |π − μ|."""
    target, behaviour, difference = 0.0, 0.0, 0.0
    for i in range(n):
        target += work[layout.TARGET, i]
        behaviour += work[layout.BEHAVIOUR, i]
        difference += work[layout.DIFFERENCE, i]
    totals[layout.SUM_TARGET] = target
    totals[layout.SUM_BEHAVIOUR] = behaviour
    totals[layout.SUM_DIFFERENCE] = difference


@reduction
def squares_about_means(
    work: Float64, n: int, mean_target: float, mean_behaviour: float, mean_difference: float
) -> tuple[float, float, float, float]:
    """Return Σ(π − mean)², Σ(μ − mean)², Σ of their product, and Σ(|π − μ| − mean)²."""
    target_squares, behaviour_squares, products, difference_squares = 0.0, 0.0, 0.0, 0.0
    for i in range(n):
        target = work[layout.TARGET, i] - mean_target
        behaviour = work[layout.BEHAVIOUR, i] - mean_behaviour
        difference = work[layout.DIFFERENCE, i] - mean_difference
        target_squares += target * target
        behaviour_squares += behaviour * behaviour
        products += target * behaviour
        difference_squares += difference * difference
    return target_squares, behaviour_squares, products, difference_squares


@reduction
def sums_of_weights(work: Float64, n: int) -> tuple[float, float]:
    """Return Σρ and Σρ², without cancellation for small ρ."""
    total, squares = 0.0, 0.0
    for i in range(n):
        ratio = 1.0 + work[layout.GROWTH, i] if work[layout.D, i] > 0.0 else work[layout.DECAY, i]
        total += ratio
        squares += ratio * ratio
    return total, squares


@reduction
def sum_entropies(work: Float64, n: int, totals: Float64) -> int:
    """Sum H and −log μ − H over the tokens with a finite entropy H, and return their number."""
    entropies, surprisals, known = 0.0, 0.0, 0
    for i in range(n):
        entropy = work[layout.ENTROPY, i]
        finite = is_finite(entropy)
        entropies += entropy if finite else 0.0
        surprisals += -work[layout.LOG_BEHAVIOUR, i] - entropy if finite else 0.0
        known += 1 if finite else 0
    totals[layout.SUM_ENTROPY] = entropies
    totals[layout.SUM_SURPRISAL] = surprisals
    return known


@compiled
def fill_advantages(work: Float64, n: int) -> None:
    """Write A·(ρ − 1) to row SKEW; 0 if A is 0, also where ρ is infinite."""
    for i in range(n):
        advantage = work[layout.ADVANTAGE, i]
        product = advantage * work[layout.RATIO_MINUS_ONE, i]
        work[layout.SKEW, i] = product if advantage != 0.0 else 0.0


@reduction
def sum_advantages(work: Float64, n: int, totals: Float64) -> int:
    """Sum the terms of the advantage A over the tokens with a finite A, and return their number; other A become 0."""
    advantages, squares, products, of_d, known = 0.0, 0.0, 0.0, 0.0, 0
    for i in range(n):
        advantage = work[layout.ADVANTAGE, i]
        finite = is_finite(advantage)
        value = advantage if finite else 0.0
        d = work[layout.D, i]
        work[layout.ADVANTAGE, i] = value
        advantages += value
        squares += value * value
        products += value * d
        of_d += d if finite else 0.0
        known += 1 if finite else 0
    fill_advantages(work, n)
    positive, negative = 0.0, 0.0
    for i in range(n):
        skew = work[layout.SKEW, i]
        positive += skew if work[layout.ADVANTAGE, i] > 0.0 else 0.0
        negative += skew if work[layout.ADVANTAGE, i] < 0.0 else 0.0
    totals[layout.SUM_ADVANTAGE] = advantages
    totals[layout.SUM_ADVANTAGE2] = squares
    totals[layout.SUM_ADVANTAGE_D] = products
    totals[layout.SUM_D_WITH_ADVANTAGE] = of_d
    totals[layout.SUM_POSITIVE_SKEW] = positive
    totals[layout.SUM_NEGATIVE_SKEW] = negative
    return known


@compiled
def count_bad_updates(work: Float64, n: int) -> int:
    """Return the number of tokens with A < 0 and μ − π ≥ PROBABILITY_GAP."""
    bad, close = 0, 0
    for i in range(n):
        lost = (work[layout.ADVANTAGE, i] < 0.0) & (work[layout.D, i] < 0.0)
        difference = work[layout.DIFFERENCE, i]
        bad += 1 if lost & (difference >= layout.PROBABILITY_GAP) else 0
        close += 1 if lost & (abs(difference - layout.PROBABILITY_GAP) < 1e-12) else 0
    if close == 0:
        return bad
    # A difference within 1e-12 of the gap is decided by the C library's functions, as in numpy.
    bad = 0
    for i in range(n):
        if work[layout.ADVANTAGE, i] < 0.0 and work[layout.D, i] < 0.0:
            difference = math.exp(work[layout.LOG_BEHAVIOUR, i]) * -math.expm1(work[layout.D, i])
            bad += 1 if difference >= layout.PROBABILITY_GAP else 0
    return bad


@compiled
def range_of_row(work: Float64, row: int, n: int) -> tuple[float, float]:
    """Return the smallest and the largest of n > 0 values; none is NaN, since d is a difference of finite numbers."""
    least, most = work[row, 0], work[row, 0]
    for i in range(n):
        value = work[row, i]
        least = smaller(value, least)
        most = larger(value, most)
    return least, most


@compiled
def largest_of_row(work: Float64, row: int, n: int) -> float:
    """Return the largest of n > 0 values; none is NaN."""
    most: float = work[row, 0]
    for i in range(n):
        most = larger(work[row, i], most)
    return most
