"""How functions of the compiled pass are compiled: without the interpreter's lock, and never with unsafe mathematics.

Importing this imports numba. `reassoc` and `contract` let a loop be vectorised and use fused multiply-adds; nothing may
assume that there are no NaNs or infinities, except where a comment says why there are none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numba

__all__ = ["compiled", "entry", "exactly", "reduction"]

F = TypeVar("F", bound=Callable[..., Any])

# Without numba's counting of references: the callers hold all arrays, and threads would wait for each other at the
# counters of those that they share.
_OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy", "_nrt": False}
# Only machine code may call these, as the wrappers that Python would call take longest to compile: calling one from
# Python ends the process.
_INNER = {**_OPTIONS, "no_cpython_wrapper": True, "no_cfunc_wrapper": True}


def compiled(function: F) -> F:
    """A function whose loops are vectorised where they add nothing up."""
    made: F = numba.njit(fastmath={"contract"}, **_INNER)(function)
    return made


def reduction(function: F) -> F:
    """A function that adds up, in whatever order suits the processor's vectors."""
    made: F = numba.njit(fastmath={"reassoc", "contract"}, **_INNER)(function)
    return made


def exactly(function: F) -> F:
    """A function whose every operation is rounded as it is written: what compensated sums need."""
    made: F = numba.njit(**_INNER)(function)
    return made


def entry(function: F, *, cached: bool) -> F:
    """A function that Python calls; `cached` keeps its machine code on disk beside the sources.

    Raises RuntimeError where numba finds no folder that it may write to.
    """
    made: F = numba.njit(fastmath={"contract"}, cache=cached, **_OPTIONS)(function)
    return made
