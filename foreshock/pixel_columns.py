"""Points of a long curve that are enough to draw it: what each column of pixels shows."""

from collections.abc import Callable, Iterable


def drawn_points(points: Iterable[tuple[int, float]], column_of: Callable[[int], int]) -> list[tuple[int, float]]:
    """Return the first, least, largest and last (step, value) of each column of pixels, in step order.

    `points` are finite and in step order; `column_of` gives the column of a step.
    """
    columns: dict[int, list[tuple[int, float]]] = {}
    for point in points:
        columns.setdefault(column_of(point[0]), []).append(point)
    drawn: list[tuple[int, float]] = []
    for inside in columns.values():
        least, largest = min(inside, key=lambda each: each[1]), max(inside, key=lambda each: each[1])
        drawn += sorted({inside[0], least, largest, inside[-1]})
    return drawn
