"""Specifications of Plotly figures: axes, traces, panels, sparklines."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from foreshock.json_values import json_value
from foreshock_service.platform import columnar

Json = dict[str, Any]
"""A Plotly trace, shape or layout in Plotly's own vocabulary, sent as JSON without changes."""

INK = "var(--ink)"
MUTED = "var(--muted)"
GRID = "var(--grid)"
HEALTHY, WARNING, CRITICAL = "var(--healthy)", "var(--warning)", "var(--critical)"
HEALTHY_BAND, WARNING_BAND, CRITICAL_BAND = "var(--healthy-band)", "var(--warning-band)", "var(--critical-band)"
SERIES = tuple(f"var(--series-{number})" for number in range(1, 7))
SERIES_BAND = "var(--series-band)"


@dataclass(frozen=True, slots=True)
class Curve:
    """Values over steps, in step order; None if a value is missing or not estimable."""

    steps: Sequence[int]
    values: Sequence[float | None]

    def points(self) -> list[tuple[int, float]]:
        """Return only the finite points."""
        return [
            (step, value)
            for step, value in zip(self.steps, self.values, strict=True)
            if value is not None and math.isfinite(value)
        ]

    def __bool__(self) -> bool:
        return bool(self.points())


MOST_POINTS = 2000
"""A plot has fewer pixels than this."""


def thinned(curve: Curve) -> Curve:
    """Return at most MOST_POINTS of the points, with the extremes of neighbouring ones."""
    if len(curve.steps) <= MOST_POINTS:
        return curve
    table = columnar.ColumnTable({"step": np.array(curve.steps), "value": np.array(curve.values, dtype=np.float64)})
    kept = columnar.keep_extremes(table, (), ("value",), MOST_POINTS)
    return Curve(kept.array("step").tolist(), columnar.floats_or_none(kept.array("value")))


@dataclass(frozen=True, slots=True)
class Figure:
    """A drawable figure: Plotly traces and layout, and the same as text.

    `columns`: the numbers by name, [N] each, if a table with a row per x and a column per trace does not fit.
    """

    title: str
    caption: str
    summary: str
    traces: Sequence[Json]
    layout: Json = field(default_factory=dict)
    height: int = 320
    columns: Mapping[str, Sequence[float | str | None]] = field(default_factory=dict)

    def to_json(self) -> Json:
        return {
            **({"columns": json_value(dict(self.columns))} if self.columns else {}),
            "title": self.title,
            "caption": self.caption,
            "summary": self.summary,
            "height": self.height,
            "data": json_value(list(self.traces)),
            "layout": json_value(self.layout),
        }


@dataclass(frozen=True, slots=True)
class Missing:
    """The reason why there is nothing to draw, and what the reader can do about it."""

    title: str
    why: str

    def to_json(self) -> Json:
        return {"title": self.title, "missing": self.why}


def line(curve: Curve, name: str, colour: str, **more: Any) -> Json:
    """Return a line over steps; short curves get markers, because a single point draws no line."""
    sparse = len(curve.points()) <= 40
    return {
        "type": "scatter",
        "mode": "lines+markers" if sparse else "lines",
        "x": list(curve.steps),
        "y": list(curve.values),
        "name": name,
        "line": {"color": colour, "width": 2, **more.pop("line", {})},
        "marker": {"size": 7 if len(curve.points()) <= 6 else 4, "color": colour, **more.pop("marker", {})},
        "connectgaps": sparse,
        **more,
    }


def banded(mean: Json, low: Sequence[float], high: Sequence[float], **more: Any) -> list[Json]:
    """Return a band from `low` to `high` behind the line of the mean."""
    edge = {"type": "scatter", "mode": "lines", "x": mean["x"], "line": {"width": 0}, "hoverinfo": "skip", **more}
    return [
        {**edge, "name": f"{mean['name']}, least", "y": low},
        {**edge, "name": f"{mean['name']}, largest", "y": high, "fill": "tonexty", "fillcolor": SERIES_BAND},
        mean,
    ]


def vertical_marker(step: float, text: str, colour: str, *, row: float = 1.0, left: bool = False) -> tuple[Json, Json]:
    """Return a dashed vertical line at `step` and its label, to the right or left, at height `row`."""
    shape = {
        "type": "line", "xref": "x", "yref": "paper", "x0": step, "x1": step, "y0": 0, "y1": 1,
        "line": {"color": colour, "width": 1.5, "dash": "dash"},
    }  # fmt: skip
    label = {
        "x": step, "xref": "x", "y": row, "yref": "paper", "text": text, "showarrow": False,
        "xanchor": "right" if left else "left", "yanchor": "top", "xshift": -4 if left else 4,
        "font": {"color": colour, "size": 12},
    }  # fmt: skip
    return shape, label


def step_axis(**more: Any) -> Json:
    return {"title": {"text": "training step"}, "rangemode": "tozero", "tickformat": "d", **more}


def log_axis(values: Sequence[float | None], labels: int = 5) -> Json:
    """Return a logarithmic axis with about `labels` labels: 1, 2 and 5 of each decade, or powers of ten."""
    positive = [value for value in values if value and 0 < value < math.inf]
    if not positive:
        return {"type": "log"}
    decades = math.log10(max(positive)) - math.log10(min(positive))
    if 3 * decades <= labels:
        # Without this format, Plotly labels both 0.2 and 20 as 2.
        return {"type": "log", "tickformat": "~g", "dtick": "D2"}
    return {"type": "log", "exponentformat": "e", "dtick": math.ceil(decades / labels)}


def scientific(value: float) -> str:
    """Return a number with three digits, such as `1.2e-5`; plain digits if they are shorter.

    Close to 1, three digits of the distance to 1 are shown: rounding to three digits would show 1.
    """
    if value == 0:
        return "0"
    distance = abs(value - 1)
    if 5e-8 <= distance < 5e-3:
        return f"{value:.{min(7, 1 - math.floor(math.log10(distance)))}f}".rstrip("0").rstrip(".")
    if 999.5 <= abs(value) < 1e5:
        return f"{value:.0f}"
    if 1e-3 <= abs(value) < 1e5:
        return f"{value:.3g}"
    mantissa, _, exponent = f"{value:.2e}".partition("e")
    return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"


def spark_paths(curves: Mapping[str, Sequence[tuple[int, float]]], *, logarithmic: bool = False) -> dict[str, str]:
    """Return the path of each curve of (place, value) in a box of 60 × 24, all on one scale; a single point has none.

    With `logarithmic`, values of 0 and below are left out.
    """
    heights = {
        name: [(x, math.log10(y) if logarithmic else y) for x, y in curve if y > 0 or not logarithmic]
        for name, curve in curves.items()
    }
    every = [y for curve in heights.values() for _, y in curve]
    low, span = min(every, default=0.0), max(every, default=0.0) - min(every, default=0.0)
    return {
        name: "M" + "L".join(f"{x} {22 - 20 * ((y - low) / span if span else 0.5):.1f}" for x, y in curve)
        for name, curve in heights.items()
        if len(curve) > 1
    }
