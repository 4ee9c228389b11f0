"""Decorators that compile the functions of the pass: without the GIL, and without unsafe floating-point assumptions.

Importing this module imports numba. `reassoc` and `contract` allow vectorised loops and fused multiply-adds. No
function may assume that there are no NaNs or infinities, unless a comment gives the reason why there are none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numba

__all__ = ["compiled", "entry", "exactly", "reduction"]

F = TypeVar("F", bound=Callable[..., Any])

# No reference counting (`_nrt`): the callers hold all arrays, and threads would contend for shared counters.
_OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy", "_nrt": False}
# Functions that only machine code calls: Python wrappers take longest to compile. Calling one from Python crashes.
_INNER = {**_OPTIONS, "no_cpython_wrapper": True, "no_cfunc_wrapper": True}


def compiled(function: F) -> F:
    """Compile a function whose loops do not accumulate."""
    made: F = numba.njit(fastmath={"contract"}, **_INNER)(function)
    return made


def reduction(function: F) -> F:
    """Compile a function that accumulates, in an order that suits the vector units."""
    made: F = numba.njit(fastmath={"reassoc", "contract"}, **_INNER)(function)
    return made


def exactly(function: F) -> F:
    """Compile a function whose operations are rounded as written, as compensated sums require."""
    made: F = numba.njit(**_INNER)(function)
    return made


def entry(function: F, *, cached: bool) -> F:
    """Compile a function that Python calls; `cached` keeps its machine code on disk beside the sources.

    Raises RuntimeError if numba finds no writable folder.
    """
    made: F = numba.njit(fastmath={"contract"}, cache=cached, **_OPTIONS)(function)
    return made
