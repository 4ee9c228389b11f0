"""Scalar functions that numba's loops can vectorise: e^x without a vector library, and choices without branches.

`prefer_wide_vectors` lets the calling function use the 512 bits of AVX-512.

Importing this imports numba. x = k·ln 2 + r with |r| ≤ ln 2 / 2; adding 1.5·2^52 rounds to the whole number k and
leaves it in the last bits, from where a shift makes the exponent of 2^k; (e^r − 1 − r)/r² is a polynomial.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

import numba
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from foreshock.measures.passes.compiled.intrinsics import bits_of, float_of

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
# ln 2 in two parts; the first has so few digits that k times it is exact.
_LN2_HIGH = 6.93147180369123816490e-01
_LN2_LOW = 1.90821492927058770002e-10
_UNDERFLOWS = -708.0  # below this e^x is no normal number, and taken as 0
_OVERFLOWS = 709.0
_C = tuple(1.0 / math.factorial(power) for power in range(2, 18))
_C0, _C1, _C2, _C3, _C4, _C5, _C6, _C7, _C8, _C9, _C10, _C11, _C12, _C13, _C14, _C15 = _C


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


def _larger(context: Any, first: Any, second: Any) -> Any:
    def code(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        flags = ("nnan", "nsz")
        above = builder.fcmp_ordered(">", *arguments, flags=flags)
        return builder.select(above, *arguments, flags=flags)

    return first(first, second), code


# The larger of two numbers of one type; any number if one is NaN, because only such a maximum is vectorised.
larger: Callable[[Any, Any], Any] = intrinsic(_larger)


def _number(context: Any, element: Any) -> Any:
    def code(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if element != types.int16:
            return arguments[0]
        word = ir.IntType(32)
        return builder.bitcast(builder.shl(builder.zext(arguments[0], word), word(16)), ir.FloatType())

    return (types.float32 if element == types.int16 else element)(element), code


# A logit as it is held in a tile: float32 or float64, or float32 of a bfloat16's bits, which come as int16.
number: Callable[[Any], Any] = intrinsic(_number)


def _prefer_wide_vectors(context: Any) -> Any:
    def code(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        # llvmlite refuses attributes that have a value, but writes every member of the set.
        set.add(builder.function.attributes, '"prefer-vector-width"="512"')
        return target.get_dummy_value()

    return types.void(), code


# Asks for vectors of 512 bits in the function that calls it. LLVM takes 256 on most processors with AVX-512, because
# the first of them lowered their clock for wider ones; no effect where there are none.
prefer_wide_vectors: Callable[[], None] = intrinsic(_prefer_wide_vectors)


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
def curvatures(d: float) -> tuple[float, float]:
    """(e^d − 1 − d)/d² and (e^−d − 1 + d)/d² for |d| ≤ 1, to 4e-16: even and odd powers are shared."""
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
    """e^x to about an ulp: 0 where it is below the normal numbers, NaN of NaN."""
    r, scale = reduced(x)
    value = scale + scale * (r + r * r * curvature(r))
    return choose(x > _OVERFLOWS, math.inf, choose(x < _UNDERFLOWS, 0.0, value))
