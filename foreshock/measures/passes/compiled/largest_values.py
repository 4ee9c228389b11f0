"""The largest values of a lane, exactly: a buffer of values above a rising floor, cut when it is full."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from foreshock.measures.passes.compiled import array_layout as layout
from foreshock.measures.passes.compiled.jit import compiled
from foreshock.measures.passes.compiled.lane_state import LaneState

__all__ = ["cut_largest", "keep_largest"]


@compiled
def move_largest_first(values: NDArray[np.float64], count: int) -> None:
    """Reorder the values so that the `count` largest come first (Hoare's selection); none is NaN."""
    first, last = 0, values.size - 1
    while first < last:
        pivot = values[(first + last) // 2]
        left, right = first, last
        while left <= right:
            while values[left] > pivot:
                left += 1
            while values[right] < pivot:
                right -= 1
            if left <= right:
                values[left], values[right] = values[right], values[left]
                left += 1
                right -= 1
        if count - 1 <= right:
            last = right
        elif count - 1 >= left:
            first = left
        else:
            return


@compiled
def cut_largest(state: LaneState, side: int) -> None:
    """Keep the KEPT_VALUES largest of the buffer and raise the floor to the smallest of them."""
    kept = state.largest_kept[side]
    if kept <= layout.KEPT_VALUES:
        return
    values = state.largest[side, :kept]
    move_largest_first(values, layout.KEPT_VALUES)
    floor = values[0]
    for index in range(layout.KEPT_VALUES):
        floor = min(floor, values[index])
    state.largest_kept[side] = layout.KEPT_VALUES
    state.largest_floor[side] = floor


@compiled
def keep_largest(state: LaneState, n: int, side: int, most: float) -> None:
    """Keep the large values of d (side 1) or −d (side 0) of n tokens; `most` is the largest of them."""
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
