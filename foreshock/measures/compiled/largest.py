"""The largest values of a lane, exactly: a buffer that takes what exceeds a rising floor and is cut when it is full."""

from __future__ import annotations

import numpy as np

from foreshock.measures.compiled import layout
from foreshock.measures.compiled.jit import compiled
from foreshock.measures.compiled.state import LaneState

__all__ = ["cut_largest", "keep_largest"]


@compiled
def cut_largest(state: LaneState, side: int) -> None:
    """Keep the KEPT_VALUES largest of the buffer; only what exceeds the least of them is taken from now on."""
    kept = state.largest_kept[side]
    if kept <= layout.KEPT_VALUES:
        return
    values = np.partition(state.largest[side, :kept], kept - layout.KEPT_VALUES)
    state.largest[side, : layout.KEPT_VALUES] = values[kept - layout.KEPT_VALUES :]
    state.largest_kept[side] = layout.KEPT_VALUES
    state.largest_floor[side] = values[kept - layout.KEPT_VALUES]


@compiled
def keep_largest(state: LaneState, n: int, side: int, most: float) -> None:
    """Take what is large of d (side 1) or of −d (side 0), where `most` is the largest of it."""
    if most <= state.largest_floor[side]:
        return
    if state.largest_kept[side] + n > layout.VALUES_BUFFER:
        cut_largest(state, side)
    kept, floor = state.largest_kept[side], state.largest_floor[side]
    sign = 1.0 if side == 1 else -1.0
    for i in range(n):
        value = sign * state.work[layout.D, i]
        if value > floor:
            state.largest[side, kept] = value
            kept += 1
    state.largest_kept[side] = kept
