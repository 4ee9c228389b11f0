"""The small curve of a tile: the path of an SVG, drawn by the service, so that it is there before any script."""

from __future__ import annotations

import math

from foreshock.pixel_columns import drawn_points
from foreshock_service.present.pages.figures.specification import Curve

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
    first, span = points[0][0], points[-1][0] - points[0][0]

    def column(step: int) -> int:
        return round((step - first) / span * WIDTH)

    heights = [(step, math.log10(value) if logarithmic else value) for step, value in points]
    drawn = drawn_points(heights, column)
    low, high = min(height for _, height in drawn), max(height for _, height in drawn)
    # A constant is a line in the middle.
    shares = [(column(step), (height - low) / (high - low) if high > low else 0.5) for step, height in drawn]
    return "M" + "L".join(f"{x} {_MARGIN + (1 - y) * (HEIGHT - 2 * _MARGIN):.1f}" for x, y in shares)
