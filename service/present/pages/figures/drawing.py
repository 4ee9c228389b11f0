"""Specifications of Plotly figures: axes, traces, panels, sparklines."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from foreshock import json_values, pixel_columns

Json = dict[str, Any]
"""A Plotly trace, shape or layout: Plotly's own vocabulary, written straight to JSON."""

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
        """Return the finite points only."""
        return [
            (step, value)
            for step, value in zip(self.steps, self.values, strict=True)
            if value is not None and math.isfinite(value)
        ]

    def last(self) -> tuple[int, float] | None:
        points = self.points()
        return points[-1] if points else None

    def __bool__(self) -> bool:
        return bool(self.points())


@dataclass(frozen=True, slots=True)
class Figure:
    """A drawable figure: Plotly traces and layout, and the same as text.

    `columns`: the numbers by name, [N] each, if the figure is no table with a row for each x and a column per trace.
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
            **({"columns": json_values.json_value(dict(self.columns))} if self.columns else {}),
            "title": self.title,
            "caption": self.caption,
            "summary": self.summary,
            "height": self.height,
            "data": json_values.json_value(list(self.traces)),
            "layout": json_values.json_value(self.layout),
        }


@dataclass(frozen=True, slots=True)
class Missing:
    """Nothing to draw, and why, in words that tell the reader what to do about it."""

    title: str
    why: str

    def to_json(self) -> Json:
        return {"title": self.title, "missing": self.why}


def line(curve: Curve, name: str, colour: str, **more: Any) -> Json:
    """Return a line over steps; short curves get markers, since one point alone draws no line."""
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


def vertical_marker(step: float, text: str, colour: str, *, row: float = 1.0, left: bool = False) -> tuple[Json, Json]:
    """Return a dashed vertical line at `step` and its label, right or left of it, at height `row`."""
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


def scientific(value: float) -> str:
    """Return a number with three digits, such as `1.2e-5`; plain digits if they are shorter.

    Close to 1 there are three digits of the distance to 1: rounding to three digits would show 1.
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


GAP = 0.09
ROW_HEIGHT = 130


@dataclass(frozen=True, slots=True)
class Panel:
    """One row: a curve, its name, and lines at the warning and critical thresholds."""

    name: str
    curve: Curve
    warning_above: float | None = None
    critical_above: float | None = None
    logarithmic: bool = False
    up_to: float | None = None


def panels_figure(title: str, caption: str, panels: Sequence[Panel], *, why_missing: str) -> Figure | Missing:
    """Return panels with a shared step axis. Panels without a value are left out and named in the caption."""
    shown = [panel for panel in panels if panel.curve]
    absent = [panel.name for panel in panels if not panel.curve]
    if not shown:
        return Missing(title, why_missing)
    layout: Json = {
        "xaxis": step_axis(anchor=_axis("y", len(shown))),
        "shapes": [],
        "annotations": [],
        "showlegend": False,
    }
    height = (1 - GAP * (len(shown) - 1)) / len(shown)
    traces = []
    for row, panel in enumerate(shown, start=1):
        top = 1 - (row - 1) * (height + GAP)
        layout[_axis("yaxis", row)] = _vertical_axis(panel, (max(top - height, 0.0), top))
        layout["annotations"].append(_name(panel, top))
        layout["shapes"].extend(_thresholds(panel, row))
        colour = SERIES[(row - 1) % len(SERIES)]
        traces.append(line(panel.curve, panel.name, colour, yaxis=_axis("y", row), hovertemplate="%{y:.4g}"))
    caption = f"{caption} Not logged by this run: {', '.join(absent)}." if absent else caption
    return Figure(title, caption, _summary(shown), traces, layout, height=90 + ROW_HEIGHT * len(shown))


def _axis(letter: str, row: int) -> str:
    return letter if row == 1 else f"{letter}{row}"


def _vertical_axis(panel: Panel, domain: tuple[float, float]) -> Json:
    axis: Json = {"domain": list(domain), "nticks": 5, "exponentformat": "e"}
    positive = [value for _, value in panel.curve.points() if value > 0]
    if panel.logarithmic and positive:
        return {**axis, "type": "log", "exponentformat": "power"}
    if panel.up_to is not None:
        return {**axis, "range": [0, panel.up_to * 1.05]}
    return axis


def _name(panel: Panel, top: float) -> Json:
    return {
        "xref": "paper", "x": 0, "xanchor": "left", "yref": "paper", "y": top, "yanchor": "bottom",
        "text": panel.name, "showarrow": False, "font": {"size": 12.5},
    }  # fmt: skip


def _thresholds(panel: Panel, row: int) -> list[Json]:
    values = [value for _, value in panel.curve.points()]
    levels = ((panel.warning_above, WARNING), (panel.critical_above, CRITICAL))
    return [
        {
            "type": "line", "xref": "paper", "x0": 0, "x1": 1, "yref": _axis("y", row), "y0": level, "y1": level,
            "line": {"color": colour, "width": 1, "dash": "dash"},
        }
        for level, colour in levels
        # A line far above the curve would flatten it; the caption names the level.
        if level is not None and max(values) >= level / 5
    ]  # fmt: skip


def _summary(panels: Sequence[Panel]) -> str:
    sentences = []
    for panel in panels:
        points = panel.curve.points()
        (first_step, first), (last_step, last) = points[0], points[-1]
        sentences.append(
            f"{panel.name}: {scientific(first)} at step {first_step}, {scientific(last)} at step {last_step}."
        )
    return " ".join(sentences)


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
    drawn = pixel_columns.drawn_points(heights, column)
    low, high = min(height for _, height in drawn), max(height for _, height in drawn)
    # A constant is a line in the middle.
    shares = [(column(step), (height - low) / (high - low) if high > low else 0.5) for step, height in drawn]
    return "M" + "L".join(f"{x} {_MARGIN + (1 - y) * (HEIGHT - 2 * _MARGIN):.1f}" for x, y in shares)
