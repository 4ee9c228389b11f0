"""Read tokens from the inputs' bytes into the rows of a chunk, and drop those that are not measured."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from foreshock.measures.passes.compiled.array_layout import (
    GENERATED,
    KEPT,
    LOG_BEHAVIOUR,
    LOG_TARGET,
    MASK_FORMAT,
    NONFINITE_BEHAVIOUR,
    NONFINITE_TARGET,
)
from foreshock.measures.passes.compiled.intrinsics import bits_of
from foreshock.measures.passes.compiled.jit import compiled
from foreshock.measures.passes.compiled.lane_state import LaneColumns, LaneState

__all__ = ["compact_floats", "compact_integers", "keep_measured", "read_floats", "read_integers", "repeat_first"]

Float64 = NDArray[np.float64]
Int64 = NDArray[np.int64]

_EXPONENT = 0x7FF << 52


@compiled
def read_floats(column: NDArray[np.uint8], width: int, at: int, n: int, work: Float64, row: int) -> None:
    """Read n float32 or float64 values from token `at` on into row `row`."""
    if width == 8:
        wide = column.view(np.float64)[at : at + n]
        for i in range(n):
            work[row, i] = wide[i]
    else:
        narrow = column.view(np.float32)[at : at + n]
        for i in range(n):
            work[row, i] = narrow[i]


@compiled
def read_integers(column: NDArray[np.uint8], width: int, at: int, n: int, integers: Int64, row: int) -> None:
    """Read n integers of 2, 4 or 8 bytes from token `at` on into row `row`."""
    if width == 8:
        wide = column.view(np.int64)[at : at + n]
        for i in range(n):
            integers[row, i] = wide[i]
    elif width == 4:
        middle = column.view(np.int32)[at : at + n]
        for i in range(n):
            integers[row, i] = middle[i]
    else:
        narrow = column.view(np.int16)[at : at + n]
        for i in range(n):
            integers[row, i] = narrow[i]


@compiled
def is_finite(value: float) -> bool:
    """Return True if the value is neither NaN nor infinite."""
    return bits_of(value) & _EXPONENT != _EXPONENT


@compiled
def count_nonfinite(work: Float64, row: int, n: int) -> int:
    """Return the number of NaN and infinite values among the first n of a row."""
    count = 0
    for i in range(n):
        count += 1 if bits_of(work[row, i]) & _EXPONENT == _EXPONENT else 0
    return count


@compiled
def count_generated(generated: NDArray[np.uint8]) -> int:
    """Return the number of entries that are not 0."""
    count = 0
    for i in range(generated.size):
        count += 1 if generated[i] != 0 else 0
    return count


@compiled
def compact_floats(work: Float64, row: int, integers: Int64, n: int) -> None:
    """Move the n measured tokens of a row of floats to its front."""
    for i in range(n):
        work[row, i] = work[row, integers[KEPT, i]]


@compiled
def compact_integers(integers: Int64, row: int, n: int) -> None:
    """Move the n measured tokens of a row of integers to its front."""
    for i in range(n):
        integers[row, i] = integers[row, integers[KEPT, i]]


@compiled
def repeat_first(work: Float64, row: int, n: int) -> None:
    """Copy the row's first value to all n tokens."""
    value = work[row, 0]
    for i in range(n):
        work[row, i] = value


@compiled
def keep_measured(columns: LaneColumns, state: LaneState, row: int, at: int, n: int) -> int:
    """Return the number of measured tokens, which are model-generated with two finite log-probs, among n tokens.

    They are moved to the front of LOG_TARGET and LOG_BEHAVIOUR. KEPT holds their positions unless all are measured.
    """
    work, integers = state.work, state.integers
    masked = columns.formats[MASK_FORMAT] != 0
    generated = count_generated(columns.generated[at : at + n]) if masked else n
    state.rollout_counts[row, GENERATED] += generated
    if generated == n and count_nonfinite(work, LOG_TARGET, n) == 0 and count_nonfinite(work, LOG_BEHAVIOUR, n) == 0:
        return n
    kept = 0
    for i in range(n):
        if masked and columns.generated[at + i] == 0:
            continue
        finite_target, finite_behaviour = is_finite(work[LOG_TARGET, i]), is_finite(work[LOG_BEHAVIOUR, i])
        state.counts[NONFINITE_TARGET] += 0 if finite_target else 1
        state.counts[NONFINITE_BEHAVIOUR] += 0 if finite_behaviour else 1
        if finite_target and finite_behaviour:
            integers[KEPT, kept] = i
            kept += 1
    compact_floats(work, LOG_TARGET, integers, kept)
    compact_floats(work, LOG_BEHAVIOUR, integers, kept)
    return kept
