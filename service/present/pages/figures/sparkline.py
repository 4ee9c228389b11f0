"""The small curve of a tile: the path of an SVG, drawn by the service, so that it is there before any script."""

from __future__ import annotations

import math

from service.present.pages.figures.specification import Curve

WIDTH, HEIGHT = 160, 36
_MARGIN = 2.0


def sparkline(curve: Curve, *, logarithmic: bool = False) -> str:
    """Return the path of a curve in a box of WIDTH × HEIGHT; empty without two points to join.

    Each column of pixels shows the least and the largest of its values. With `logarithmic`, values of 0 and below are
    left out.
    """
    points = [(step, value) for step, value in curve.points() if value > 0 or not logarithmic]
    if len(points) < 2:
        return ""
    heights = [math.log10(value) if logarithmic else value for _, value in points]
    first, span = points[0][0], points[-1][0] - points[0][0]
    low, height = min(heights), max(heights) - min(heights)
    columns: dict[int, list[float]] = {}
    for (step, _), value in zip(points, heights, strict=True):
        columns.setdefault(round((step - first) / span * WIDTH), []).append(value)
    joined = [
        (x, value)
        for x, inside in columns.items()
        for value in dict.fromkeys((inside[0], min(inside), max(inside), inside[-1]))
    ]
    # A constant is a line in the middle.
    share = [(x, (value - low) / height if height else 0.5) for x, value in joined]
    return "M" + "L".join(f"{x} {_MARGIN + (1 - y) * (HEIGHT - 2 * _MARGIN):.1f}" for x, y in share)
