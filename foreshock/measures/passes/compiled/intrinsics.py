"""Instructions that compiled loops need and numba does not generate by itself.

Importing this module imports numba.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic
from numba.np.arrayobj import make_array
from numpy.typing import NDArray

__all__ = ["add_four", "bits_of", "float_of", "larger", "prefetch_row", "smaller"]

Table = NDArray[np.float64]

# Flags that let a loop be vectorised; a function's fastmath flags do not apply to its selects.
_NEVER_NAN = ("nnan", "nsz", "reassoc")
_VECTOR = ir.VectorType(ir.DoubleType(), 4)
_NUMBER = ir.IntType(32)


def _extreme(comparison: str) -> Any:
    def extreme(context: Any, first: Any, second: Any) -> Any:
        def code(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            chosen = builder.fcmp_ordered(comparison, *arguments, flags=_NEVER_NAN)
            return builder.select(chosen, *arguments, flags=_NEVER_NAN)

        return types.float64(types.float64, types.float64), code

    return intrinsic(extreme)


def _row(target: Any, builder: Any, signature: Any, arguments: Any, kind: ir.Type) -> Any:
    """Return the address of a row of a contiguous [R, 4] table; negative rows are not supported."""
    table = make_array(signature.args[0])(target, builder, arguments[0])
    place = builder.gep(table.data, [builder.mul(arguments[1], ir.Constant(arguments[1].type, 4))])
    return builder.bitcast(place, kind.as_pointer())


def _add_four(context: Any, table: Any, row: Any, first: Any, second: Any, third: Any, fourth: Any) -> Any:
    def code(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        where = _row(target, builder, signature, arguments, _VECTOR)
        values = ir.Constant(_VECTOR, ir.Undefined)
        for place, value in enumerate(arguments[2:]):
            values = builder.insert_element(values, value, ir.Constant(_NUMBER, place))
        # Only the numbers are aligned to 8 bytes, not the rows to 32.
        builder.store(builder.fadd(builder.load(where, align=8), values), where, align=8)
        return target.get_dummy_value()

    return types.void(table, types.int64, *[types.float64] * 4), code


def _fetch_row(context: Any, table: Any, row: Any) -> Any:
    def code(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        where = _row(target, builder, signature, arguments, ir.IntType(8))
        kind = ir.FunctionType(ir.VoidType(), [where.type, _NUMBER, _NUMBER, _NUMBER])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        to_write, into_all_caches, data = (ir.Constant(_NUMBER, value) for value in (1, 3, 1))
        builder.call(function, [where, to_write, into_all_caches, data])
        return target.get_dummy_value()

    return types.void(table, types.int64), code


def _bits_of(context: Any, value: Any) -> Any:
    def code(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], target.get_value_type(types.int64))

    return types.int64(types.float64), code


def _float_of(context: Any, bits: Any) -> Any:
    def code(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], target.get_value_type(types.float64))

    return types.float64(types.int64), code


# Return the larger or the smaller of two numbers, neither of which is NaN.
larger: Callable[[float, float], float] = _extreme(">")
smaller: Callable[[float, float], float] = _extreme("<")
# Add four numbers to a row of a contiguous [R, 4] table, as one vector.
add_four: Callable[[Table, int, float, float, float, float], None] = intrinsic(_add_four)
# Prefetch a row of such a table into the cache.
prefetch_row: Callable[[Table, int], None] = intrinsic(_fetch_row)
# Reinterpret the bits of a float64 as an int64, and back.
bits_of: Callable[[float], int] = intrinsic(_bits_of)
float_of: Callable[[int], float] = intrinsic(_float_of)
