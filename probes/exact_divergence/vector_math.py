"""Scalar functions that numba's loops can vectorise: e^x without a vector library, and choices without branches.

Importing this imports numba. x = k·ln 2 + r with |r| ≤ ln 2 / 2; adding 1.5·2^52 rounds to the whole number k and
leaves it in the last bits, from where a shift makes the exponent of 2^k; (e^r − 1 − r)/r² is a polynomial.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

import numba
from numba.core import types
from numba.extending import intrinsic

from foreshock.measures.passes.compiled.intrinsics import bits_of, float_of

__all__ = ["choose", "curvature", "exponential", "inlined", "reduced"]

F = TypeVar("F", bound=Callable[..., Any])

_LOG2_E = 1.4426950408889634
_ROUNDER = 6755399441055744.0  # 1.5·2^52
# ln 2 in two parts; the first has so few digits that k times it is exact.
_LN2_HIGH = 6.93147180369123816490e-01
_LN2_LOW = 1.90821492927058770002e-10
_UNDERFLOWS = -708.0  # below this e^x is no normal number, and taken as 0
_OVERFLOWS = 709.0
_C = tuple(1.0 / math.factorial(power) for power in range(2, 14))
_C0, _C1, _C2, _C3, _C4, _C5, _C6, _C7, _C8, _C9, _C10, _C11 = _C


def inlined(function: F) -> F:
    """A function that is part of its callers' loops, and keeps the order of its own operations."""
    made: F = numba.njit(fastmath={"contract"}, forceinline=True, error_model="numpy")(function)
    return made


def _choose(context: Any, condition: Any, yes: Any, no: Any) -> Any:
    def code(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.select(*arguments)

    return types.float64(types.boolean, types.float64, types.float64), code


# One of two numbers. Both are computed: a branch would keep the loop from being vectorised.
choose: Callable[[Any, float, float], float] = intrinsic(_choose)


@inlined
def reduced(x: float) -> tuple[float, float]:
    """r and 2^k of x; nonsense, but no trap, where e^x under- or overflows."""
    shifted = x * _LOG2_E + _ROUNDER
    k = shifted - _ROUNDER
    return (x - k * _LN2_HIGH) - k * _LN2_LOW, float_of((bits_of(shifted) + 1023) << 52)


@inlined
def curvature(r: float) -> float:
    """(e^r − 1 − r)/r² for |r| ≤ ln 2 / 2."""
    square = r * r
    fourth = square * square
    low = (_C0 + _C1 * r) + square * (_C2 + _C3 * r)
    middle = (_C4 + _C5 * r) + square * (_C6 + _C7 * r)
    return low + fourth * (middle + fourth * ((_C8 + _C9 * r) + square * (_C10 + _C11 * r)))


@inlined
def exponential(x: float) -> float:
    """e^x to about an ulp: 0 where it is below the normal numbers, NaN of NaN."""
    r, scale = reduced(x)
    value = scale + scale * (r + r * r * curvature(r))
    return choose(x > _OVERFLOWS, math.inf, choose(x < _UNDERFLOWS, 0.0, value))
