"""Down-sampling of curves: each stretch of steps keeps the rows of its extremes, so that spikes stay visible."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from foreshock_service.platform.columnar.table import ColumnTable


def keep_extremes(table: ColumnTable, curves: Sequence[str], measures: Sequence[str], max_points: int) -> ColumnTable:
    """Keep at most about `max_points` rows per curve, as they were measured and never averaged.

    A curve is a stretch of rows with equal values in the columns `curves`. Its first and last row stay; between them
    each of equally long stretches keeps, for each measure, the row of its smallest and of its largest finite value.
    With many measures there are at least two rows a measure, whatever `max_points`.
    """
    values = [table.array(name) for name in measures]
    kept = [_of_one_curve(values, first, end, max_points) for first, end in table.groups(*curves)]
    return table.rows(np.concatenate(kept)) if kept else table


def _of_one_curve(measures: Sequence[NDArray[np.float64]], first: int, end: int, max_points: int) -> NDArray[np.int64]:
    count = end - first
    if count <= max_points:
        return np.arange(first, end)
    stretches = max(1, (max_points - 2) // max(1, 2 * len(measures)))
    length = math.ceil(count / stretches)
    whole = math.ceil(count / length)
    starts = first + length * np.arange(whole)
    kept = [np.array([first, end - 1])]
    for measure in measures:
        # An overflowed value is shown as missing, so it must not be selected as the largest one.
        values = np.full(whole * length, np.nan)
        values[:count] = np.where(np.isfinite(measure[first:end]), measure[first:end], np.nan)
        table = values.reshape(whole, length)
        present = ~np.isnan(table).all(axis=1)
        if present.any():
            kept += [starts[present] + pick(table[present], axis=1) for pick in (np.nanargmin, np.nanargmax)]
    return np.unique(np.concatenate(kept))
