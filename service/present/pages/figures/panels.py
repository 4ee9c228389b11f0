"""Small multiples: several quantities over the same steps, each with its own axis, one below the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from foreshock_service.present.pages.figures.specification import (
    CRITICAL,
    SERIES,
    WARNING,
    Curve,
    Figure,
    Json,
    Missing,
    line,
    scientific,
    step_axis,
)

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
