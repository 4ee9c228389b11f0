"""Down-sampling of curves: each stretch of steps keeps the rows of its extremes, so that spikes stay visible."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby

from service.runs.measurements.curves import Curves


def keep_extremes(curves: Curves, max_points: int) -> Curves:
    """Keep at most about `max_points` rows per comparison, as they were measured and never averaged.

    The first and the last row stay; between them each of equally long stretches keeps, for each measure, the row of its
    smallest and of its largest value. With many measures there are at least two rows a measure, whatever `max_points`.
    """
    kept: list[int] = []
    indexed = range(len(curves.keys))
    for _, group in groupby(indexed, key=lambda index: curves.keys[index][2]):
        kept += _of_one_comparison(curves, list(group), max_points)
    return curves.rows(kept)


def _of_one_comparison(curves: Curves, rows: Sequence[int], max_points: int) -> list[int]:
    if len(rows) <= max_points:
        return list(rows)
    stretches = max(1, (max_points - 2) // max(1, 2 * len(curves.measures)))
    length = math.ceil(len(rows) / stretches)
    kept = {rows[0], rows[-1]}
    for start in range(0, len(rows), length):
        stretch = rows[start : start + length]
        for measure in range(len(curves.measures)):
            # An overflowed value is shown as missing, so it must not be selected as the largest one.
            values = ((curves.values[row][measure], row) for row in stretch)
            present = [(value, row) for value, row in values if value is not None and math.isfinite(value)]
            if present:
                kept |= {min(present)[1], max(present)[1]}
    return sorted(kept)
