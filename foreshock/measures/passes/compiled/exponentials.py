"""e^x over the tokens of a chunk, written so that a compiler without a vector library can vectorise it.

x = k·ln 2 + r with |r| ≤ ln 2 / 2. Adding 1.5·2^52 rounds to the integer k and leaves it in the last bits; a shift
turns it into the exponent of 2^k. (e^r − 1 − r)/r² is a polynomial. Results are accurate to about two units in the last
place, including k3 near 0, where expm1(d) − d is not.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from foreshock.measures.passes.compiled.array_layout import (
    ABS_D,
    BEHAVIOUR,
    DECAY,
    DIFFERENCE,
    GROWTH,
    K3,
    LOG_BEHAVIOUR,
    LOG_TARGET,
    RATIO_MINUS_ONE,
    SHRINKAGE,
    TARGET,
    D,
)
from foreshock.measures.passes.compiled.intrinsics import bits_of, float_of
from foreshock.measures.passes.compiled.jit import compiled

__all__ = ["fill_probabilities", "fill_ratios"]

Float64 = NDArray[np.float64]

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
_C0, _C1, _C2, _C3, _C4, _C5, _C6, _C7, _C8, _C9, _C10, _C11 = _C


@compiled
def curvature(r: float) -> float:
    """Return (e^r − 1 − r)/r² for |r| ≤ ln 2 / 2."""
    square = r * r
    even = _C0 + square * (_C2 + square * (_C4 + square * (_C6 + square * (_C8 + square * _C10))))
    odd = _C1 + square * (_C3 + square * (_C5 + square * (_C7 + square * (_C9 + square * _C11))))
    return even + r * odd


@compiled
def fill_ratios(work: Float64, n: int) -> None:
    """Compute d, |d| and the terms of e^|d| from the log-probs of n tokens."""
    for i in range(n):
        d = work[LOG_TARGET, i] - work[LOG_BEHAVIOUR, i]
        x = abs(d)
        bounded = x if x < _OVERFLOWS else _OVERFLOWS
        shifted = bounded * _LOG2_E + _ROUNDER
        k = shifted - _ROUNDER
        r = (bounded - k * _LN2_HIGH) - k * _LN2_LOW
        rest = r * r * curvature(r)
        half_scale = float_of((bits_of(shifted) + 1022) << 52)
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
        work[RATIO_MINUS_ONE, i] = growth if d > 0.0 else -shrinkage
        work[K3, i] = k3_above if d > 0.0 else k3_below


@compiled
def fill_probabilities(work: Float64, n: int) -> None:
    """Compute π, μ and |π − μ| of n tokens from one exponential, that of the larger probability."""
    for i in range(n):
        # All loads come before the selects: a load that depends on a select is not vectorised.
        target, behaviour, lower = work[LOG_TARGET, i], work[LOG_BEHAVIOUR, i], work[D, i] < 0.0
        decay, shrinkage = work[DECAY, i], work[SHRINKAGE, i]
        larger = behaviour if lower else target
        bounded = larger if larger < _OVERFLOWS else _OVERFLOWS
        bounded = bounded if bounded > _UNDERFLOWS else _UNDERFLOWS
        shifted = bounded * _LOG2_E + _ROUNDER
        k = shifted - _ROUNDER
        r = (bounded - k * _LN2_HIGH) - k * _LN2_LOW
        half_scale = float_of((bits_of(shifted) + 1022) << 52)
        value = 2.0 * (half_scale + half_scale * (r + r * r * curvature(r)))
        probability = value if larger > _UNDERFLOWS else 0.0
        smaller = probability * decay
        work[TARGET, i] = smaller if lower else probability
        work[BEHAVIOUR, i] = probability if lower else smaller
        work[DIFFERENCE, i] = probability * shrinkage
