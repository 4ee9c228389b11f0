"""Tokens from the inputs' bytes into the rows of a chunk, and those that are not measured out of it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from foreshock.measures.passes.compiled.array_layout import (
    GENERATED,
    KEPT,
    LOG_BEHAVIOUR,
    LOG_TARGET,
    NONFINITE_BEHAVIOUR,
    NONFINITE_TARGET,
    OF_MASK,
)
from foreshock.measures.passes.compiled.intrinsics import bits_of
from foreshock.measures.passes.compiled.jit import compiled
from foreshock.measures.passes.compiled.lane_state import LaneColumns, LaneState

__all__ = ["compact", "compact_whole", "measured_tokens", "read_floats", "read_integers", "repeat_first"]

Float64 = NDArray[np.float64]
Int64 = NDArray[np.int64]

_EXPONENT = 0x7FF << 52


@compiled
def read_floats(column: NDArray[np.uint8], width: int, at: int, n: int, work: Float64, row: int) -> None:
    """n float32 or float64 values from token `at` on."""
    if width == 8:
        wide = column.view(np.float64)[at : at + n]
        for i in range(n):
            work[row, i] = wide[i]
    else:
        narrow = column.view(np.float32)[at : at + n]
        for i in range(n):
            work[row, i] = narrow[i]


@compiled
def read_integers(column: NDArray[np.uint8], width: int, at: int, n: int, whole: Int64, row: int) -> None:
    """n whole numbers of 2, 4 or 8 bytes from token `at` on."""
    if width == 8:
        wide = column.view(np.int64)[at : at + n]
        for i in range(n):
            whole[row, i] = wide[i]
    elif width == 4:
        middle = column.view(np.int32)[at : at + n]
        for i in range(n):
            whole[row, i] = middle[i]
    else:
        narrow = column.view(np.int16)[at : at + n]
        for i in range(n):
            whole[row, i] = narrow[i]


@compiled
def is_finite(value: float) -> bool:
    return bits_of(value) & _EXPONENT != _EXPONENT


@compiled
def nonfinite(work: Float64, row: int, n: int) -> int:
    count = 0
    for i in range(n):
        count += 1 if bits_of(work[row, i]) & _EXPONENT == _EXPONENT else 0
    return count


@compiled
def generated_tokens(generated: NDArray[np.uint8]) -> int:
    count = 0
    for i in range(generated.size):
        count += 1 if generated[i] != 0 else 0
    return count


@compiled
def compact(work: Float64, row: int, whole: Int64, n: int) -> None:
    """Move the n measured tokens of a row to its front."""
    for i in range(n):
        work[row, i] = work[row, whole[KEPT, i]]


@compiled
def compact_whole(whole: Int64, row: int, n: int) -> None:
    """Move the n measured tokens of a row of whole numbers to its front."""
    for i in range(n):
        whole[row, i] = whole[row, whole[KEPT, i]]


@compiled
def repeat_first(work: Float64, row: int, n: int) -> None:
    """Give all n tokens the row's first value."""
    value = work[row, 0]
    for i in range(n):
        work[row, i] = value


@compiled
def measured_tokens(columns: LaneColumns, state: LaneState, row: int, at: int, n: int) -> int:
    """How many of n tokens are model-generated with two finite log-probs: they are moved to the front of LOG_TARGET
    and LOG_BEHAVIOUR, and where they stood is in KEPT unless all are.
    """
    work, whole = state.work, state.whole
    masked = columns.formats[OF_MASK] != 0
    generated = generated_tokens(columns.generated[at : at + n]) if masked else n
    state.rollout_counts[row, GENERATED] += generated
    if generated == n and nonfinite(work, LOG_TARGET, n) == 0 and nonfinite(work, LOG_BEHAVIOUR, n) == 0:
        return n
    kept = 0
    for i in range(n):
        if masked and columns.generated[at + i] == 0:
            continue
        finite_target, finite_behaviour = is_finite(work[LOG_TARGET, i]), is_finite(work[LOG_BEHAVIOUR, i])
        state.counts[NONFINITE_TARGET] += 0 if finite_target else 1
        state.counts[NONFINITE_BEHAVIOUR] += 0 if finite_behaviour else 1
        if finite_target and finite_behaviour:
            whole[KEPT, kept] = i
            kept += 1
    compact(work, LOG_TARGET, whole, kept)
    compact(work, LOG_BEHAVIOUR, whole, kept)
    return kept
