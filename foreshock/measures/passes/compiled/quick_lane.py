"""The lane of the quick comparison: only the sums that verl's thirteen off-policy metrics are made of."""

from __future__ import annotations

from collections.abc import Callable

from foreshock.measures.passes.compiled import layout
from foreshock.measures.passes.compiled.chunk_sums import sum_log_probs, sum_ratios
from foreshock.measures.passes.compiled.exponentials import fill_ratios
from foreshock.measures.passes.compiled.jit import entry
from foreshock.measures.passes.compiled.reading import measured_tokens, read_floats
from foreshock.measures.passes.compiled.state import LaneColumns, LaneState

__all__ = ["QuickLaneFunction", "quick_lane_function"]

QuickLaneFunction = Callable[[LaneColumns, LaneState, int, int], int]


def quick_lane_function(sources: int, *, cached: bool) -> QuickLaneFunction:
    """The compiled function that fills `sums` and `rollout_counts` of rollouts `first` to `last` with what d and the
    log-probs give; the rest of the state stays as it is. It returns `sources`.
    """

    def sum_lane_quickly(columns: LaneColumns, state: LaneState, first: int, last: int) -> int:
        formats, work, totals = columns.formats, state.work, state.totals
        for row in range(first, last):
            start, stop = columns.offsets[row], columns.offsets[row + 1]
            for at in range(start, stop, layout.CHUNK):
                n = min(layout.CHUNK, stop - at)
                read_floats(columns.target, formats[layout.OF_TARGET], at, n, work, layout.LOG_TARGET)
                read_floats(columns.behaviour, formats[layout.OF_BEHAVIOUR], at, n, work, layout.LOG_BEHAVIOUR)
                measured = measured_tokens(columns, state, row, at, n)
                if measured == 0:
                    continue
                fill_ratios(work, measured)
                sum_ratios(work, measured, totals)
                sum_log_probs(work, measured, totals)
                for index in range(layout.SUMS):
                    state.sums[row, index] += totals[index]
                state.rollout_counts[row, layout.TOKENS] += measured
        return sources

    return entry(sum_lane_quickly, cached=cached)
