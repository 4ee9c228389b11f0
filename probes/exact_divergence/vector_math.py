"""Scalar functions that numba can vectorise within loops: e^x without a vector library, selection without branches.

Importing this module imports numba. e^x is computed from x = k·ln 2 + r with |r| ≤ ln 2 / 2: adding 1.5·2^52 rounds to
the integer k in the last bits, a shift makes it the exponent of 2^k, and (e^r − 1 − r)/r² is a polynomial.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

import numba
import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

__all__ = [
    "choose",
    "curvature",
    "curvatures",
    "exponential",
    "inlined",
    "larger",
    "number",
    "prefer_wide_vectors",
    "reduced",
]

F = TypeVar("F", bound=Callable[..., Any])

_LOG2_E = 1.4426950408889634
_ROUNDER = 6755399441055744.0  # 1.5·2^52
# ln 2 in two parts; the first has few enough digits that its product with k is exact.
_LN2_HIGH = 6.93147180369123816490e-01
_LN2_LOW = 1.90821492927058770002e-10
_UNDERFLOWS = -708.0  # e^x is subnormal below it, and set to 0
_OVERFLOWS = 709.0
_C = tuple(1.0 / math.factorial(power) for power in range(2, 18))
_C0, _C1, _C2, _C3, _C4, _C5, _C6, _C7, _C8, _C9, _C10, _C11, _C12, _C13, _C14, _C15 = _C


def inlined(function: F) -> F:
    """Compile the function for inlining into its callers' loops, without reordering its own operations."""
    made: F = numba.njit(fastmath={"contract"}, forceinline=True, error_model="numpy")(function)
    return made


def _choose(context: Any, condition: Any, yes: Any, no: Any) -> Any:
    def code(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.select(*arguments)

    return types.float64(types.boolean, types.float64, types.float64), code


# Select one of two numbers, both computed; a branch would prevent vectorisation.
choose: Callable[[Any, float, float], float] = intrinsic(_choose)


def _larger(context: Any, first: Any, second: Any) -> Any:
    def code(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        flags = ("nnan", "nsz")
        above = builder.fcmp_ordered(">", *arguments, flags=flags)
        return builder.select(above, *arguments, flags=flags)

    return first(first, second), code


# The larger of two numbers of one type; undefined if one is NaN, because only such a maximum is vectorised.
larger: Callable[[Any, Any], Any] = intrinsic(_larger)


def _number(context: Any, element: Any) -> Any:
    def code(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if element != types.int16:
            return arguments[0]
        word = ir.IntType(32)
        return builder.bitcast(builder.shl(builder.zext(arguments[0], word), word(16)), ir.FloatType())

    return (types.float32 if element == types.int16 else element)(element), code


# A logit of a tile: float32 or float64 unchanged; int16, the bits of a bfloat16, as float32.
number: Callable[[Any], Any] = intrinsic(_number)


def _prefer_wide_vectors(context: Any) -> Any:
    def code(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        # llvmlite's own add() rejects attributes with a value, but every member of the set is written.
        set.add(builder.function.attributes, '"prefer-vector-width"="512"')
        return target.get_dummy_value()

    return types.void(), code


# Request 512-bit vectors in the calling function. LLVM prefers 256 bits on most CPUs with AVX-512, because early ones
# lowered their clock for 512; no effect on CPUs without AVX-512.
prefer_wide_vectors: Callable[[], None] = intrinsic(_prefer_wide_vectors)


@inlined
def reduced(x: float) -> tuple[float, float]:
    """Return r and 2^k of x; both are undefined, without a trap, if e^x under- or overflows."""
    shifted = x * _LOG2_E + _ROUNDER
    k = shifted - _ROUNDER
    scale = np.int64((np.float64(shifted).view(np.int64) + 1023) << 52).view(np.float64)
    return (x - k * _LN2_HIGH) - k * _LN2_LOW, scale


@inlined
def curvature(r: float) -> float:
    """Return (e^r − 1 − r)/r² for |r| ≤ ln 2 / 2."""
    square = r * r
    fourth = square * square
    low = (_C0 + _C1 * r) + square * (_C2 + _C3 * r)
    middle = (_C4 + _C5 * r) + square * (_C6 + _C7 * r)
    return low + fourth * (middle + fourth * ((_C8 + _C9 * r) + square * (_C10 + _C11 * r)))


@inlined
def curvatures(d: float) -> tuple[float, float]:
    """Return (e^d − 1 − d)/d² and (e^−d − 1 + d)/d² for |d| ≤ 1, to 4e-16; they share even and odd powers."""
    square = d * d
    fourth = square * square
    eighth = fourth * fourth
    even = ((_C0 + _C2 * square) + fourth * (_C4 + _C6 * square)) + eighth * (
        (_C8 + _C10 * square) + fourth * (_C12 + _C14 * square)
    )
    odd = ((_C1 + _C3 * square) + fourth * (_C5 + _C7 * square)) + eighth * (
        (_C9 + _C11 * square) + fourth * (_C13 + _C15 * square)
    )
    return even + d * odd, even - d * odd


@inlined
def exponential(x: float) -> float:
    """Return e^x to about 1 ulp; 0 if e^x is subnormal, NaN if x is NaN."""
    r, scale = reduced(x)
    value = scale + scale * (r + r * r * curvature(r))
    return choose(x > _OVERFLOWS, math.inf, choose(x < _UNDERFLOWS, 0.0, value))
