"""The strip of a run's curves, and the curve of its learning rate."""

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from foreshock_service.present.pages.figures import drawing

MOST_COLUMNS = 280
"""Pixel columns of a panel: of a longer curve, each column shows the mean and the range."""
LONGEST_PANEL_NAME = 32
FEW_STEPS = 6
MOST_CHANGES = 50
_TONES = {"critical": drawing.CRITICAL, "warning": drawing.WARNING}
_TICK = 0.07


@dataclass(frozen=True, slots=True)
class Panel:
    """A curve with its name, and horizontal lines by name: thresholds, a baseline."""

    name: str
    curve: drawing.Curve
    logarithmic: bool = False
    lines: Mapping[str, tuple[float, str]] = field(default_factory=dict)
    """(value, colour) by name."""


@dataclass(frozen=True, slots=True)
class Mark:
    """A step at which something happened, and a few words about it; `severity` is that of an alert, else empty."""

    step: int
    text: str
    severity: str = ""


def columns_of(curve: drawing.Curve) -> tuple[list[float], list[float], list[float], list[float]]:
    """Return step, mean, least and largest of each pixel column; a short curve has a column for each step."""
    points = curve.points()
    steps, values = (np.array([point[part] for point in points], dtype=float) for part in (0, 1))
    if len(points) <= MOST_COLUMNS:
        return steps.tolist(), values.tolist(), values.tolist(), values.tolist()
    span = steps[-1] - steps[0] + 1
    starts = np.unique(((steps - steps[0]) * MOST_COLUMNS // span).astype(int), return_index=True)[1]
    counts = np.diff(np.append(starts, steps.size))
    means = np.add.reduceat(values, starts) / counts
    low, high = np.minimum.reduceat(values, starts), np.maximum.reduceat(values, starts)
    return steps[starts + counts // 2].tolist(), means.tolist(), low.tolist(), high.tolist()


def overview_figure(
    title: str, caption: str, panels: Sequence[Panel], marks: Sequence[Mark], *, why_missing: str
) -> drawing.Figure | drawing.Missing:
    """Return a panel for each curve that has a value; the page places them. Every panel shows the same steps."""
    shown = [panel for panel in panels if panel.curve]
    if not shown:
        return drawing.Missing(title, why_missing)
    traces: list[drawing.Json] = []
    layout: drawing.Json = {"shapes": [], "annotations": [], "showlegend": False, "panels": len(shown)}
    last = max(panel.curve.points()[-1][0] for panel in shown)
    # No labels between whole steps.
    ticks = {"dtick": 1} if last < FEW_STEPS else {"nticks": 6}
    for number, panel in enumerate(shown, start=1):
        axis = "" if number == 1 else str(number)
        # Axes without titles: the panels share the step axis, which the caption names.
        layout[f"xaxis{axis}"] = {"anchor": f"y{axis}", "rangemode": "normal", "tickformat": "d", **ticks} | (
            {"matches": "x"} if axis else {}
        )
        values = [value for _, value in panel.curve.points()]
        scale = drawing.log_axis(values) if panel.logarithmic and max(values) > 0 else _flat_axis(values)
        layout[f"yaxis{axis}"] = {"anchor": f"x{axis}", "nticks": 4, "exponentformat": "e"} | scale
        traces += _traces(panel, axis)
        layout["annotations"].append(_name(panel, axis))
        layout["shapes"] += [*_lines(panel, axis), *shapes_of(marks, axis)]
    absent = [panel.name for panel in panels if not panel.curve]
    words = [caption, f"Not logged: {', '.join(absent)}." if absent else ""]
    return drawing.Figure(title, " ".join(filter(None, words)), _summary(shown), traces, layout, height=150)


def _flat_axis(values: Sequence[float]) -> drawing.Json:
    """Return the axis range of a curve with a single small value: Plotly would add 1 on both sides."""
    return {"range": sorted((0.0, 2 * values[0]))} if min(values) == max(values) and 0 < abs(values[0]) < 0.5 else {}


def _traces(panel: Panel, axis: str) -> list[drawing.Json]:
    steps, means, low, high = columns_of(panel.curve)
    if panel.logarithmic:
        kept = [at for at, mean in enumerate(means) if mean > 0]
        steps, means, low, high = ([each[at] for at in kept] for each in (steps, means, low, high))
        low = [least if least > 0 else mean for least, mean in zip(low, means, strict=True)]
    on = {"xaxis": f"x{axis}", "yaxis": f"y{axis}"}
    curve = drawing.Curve([int(step) for step in steps], means)
    mean = drawing.line(curve, panel.name, drawing.SERIES[0], hovertemplate="%{y:.4g}", **on)
    mean["line"]["width"] = 1.6
    if low == high:
        return [mean]
    return drawing.banded(mean, low, high, **on)


def _name(panel: Panel, axis: str) -> drawing.Json:
    newest = panel.curve.points()[-1][1]
    return {
        "xref": f"x{axis} domain", "x": 0, "xanchor": "left", "yref": f"y{axis} domain", "y": 1.0, "yanchor": "bottom",
        "text": f"{_short(panel.name)}, newest <b>{drawing.scientific(newest)}</b>", "showarrow": False,
        "font": {"size": 12, "color": drawing.INK},
    }  # fmt: skip


def _short(name: str) -> str:
    """Return a name as text, not markup; of a long one the end, which differs."""
    short = name if len(name) <= LONGEST_PANEL_NAME else f"…{name[1 - LONGEST_PANEL_NAME :]}"
    return html.escape(short, quote=False)


def _lines(panel: Panel, axis: str) -> list[drawing.Json]:
    largest = max(value for _, value in panel.curve.points())
    return [
        {
            "type": "line", "layer": "below", "xref": f"x{axis} domain", "x0": 0, "x1": 1, "yref": f"y{axis}",
            "y0": level, "y1": level, "line": {"color": colour, "width": 1, "dash": "dash"}, "name": name,
        }
        for name, (level, colour) in panel.lines.items()
        # A threshold far above the curve would flatten it; the caption names it.
        if largest >= level / (30 if panel.logarithmic else 5)
    ]  # fmt: skip


def shapes_of(marks: Sequence[Mark], axis: str = "") -> list[drawing.Json]:
    """Return a short mark on the axis for each alert, a dotted line for every other mark."""
    alerts = {mark.step: mark for mark in sorted(marks, key=lambda each: each.severity == "critical") if mark.severity}
    others = [mark for mark in marks if not mark.severity][-MOST_CHANGES:]
    return [
        {
            "type": "line", "layer": "above" if mark.severity else "below", "xref": f"x{axis}",
            "x0": mark.step, "x1": mark.step, "yref": f"y{axis} domain", "y0": 0, "y1": _TICK if mark.severity else 1,
            "line": {"color": _TONES.get(mark.severity, drawing.MUTED), "width": 3} if mark.severity
            else {"color": drawing.MUTED, "width": 1.2, "dash": "dot"},
        }
        for mark in (*alerts.values(), *others)
    ]  # fmt: skip


def marked(figure: drawing.Figure, marks: Sequence[Mark], named: Sequence[Mark]) -> drawing.Figure:
    """Return a figure over steps with marks, and with a dashed line and its name at each of `named`."""
    layout = {
        **figure.layout,
        "shapes": [*figure.layout.get("shapes", []), *shapes_of(marks)],
        "annotations": list(figure.layout.get("annotations", [])),
    }
    for at, mark in enumerate(named):
        # Names alternate between three heights, so that names of close steps do not cover each other.
        shape, label = drawing.vertical_marker(mark.step, mark.text, drawing.MUTED, row=0.08 + 0.08 * (at % 3))
        layout["shapes"].append(shape)
        layout["annotations"].append(label)
    caption = f"{figure.caption} {legend_of(marks)}".strip()
    return replace(figure, caption=caption, layout=layout)


def legend_of(marks: Sequence[Mark]) -> str:
    changes = [mark for mark in marks if not mark.severity]
    named = "; ".join(f"step {mark.step}, {mark.text}" for mark in changes[-3:])
    words = ["Marks on the axis: alerts."] if len(changes) < len(marks) else []
    return " ".join([*words, f"Dotted: changes at {named}."] if changes else words)


def _summary(panels: Sequence[Panel]) -> str:
    sentences = []
    for panel in panels:
        points = panel.curve.points()
        low, high = min(points, key=lambda each: each[1]), max(points, key=lambda each: each[1])
        sentences.append(
            f"{panel.name}: {drawing.scientific(points[-1][1])} at step {points[-1][0]}, between "
            f"{drawing.scientific(low[1])} (step {low[0]}) and {drawing.scientific(high[1])} (step {high[0]})."
        )
    return " ".join(sentences)


LEARNING_RATE_TITLE = "Learning-rate scale"


@dataclass(frozen=True, slots=True)
class ScaleCurve:
    """The scale as a staircase of (step, scale from that step on), in step order; `now` separates past and plan."""

    stairs: Sequence[tuple[int, float]]
    now: int
    end: int
    shadow: bool
    acknowledged: Sequence[tuple[int, float]] = ()
    """(step, applied learning rate ÷ initial learning rate) as the trainer reported it."""


def learning_rate_figure(curve: ScaleCurve | None) -> drawing.Figure | drawing.Missing:
    """Return a step curve in [0, 1], which multiplies the base schedule of the trainer."""
    if curve is None or not curve.stairs:
        return drawing.Missing(LEARNING_RATE_TITLE, "No advice yet: the first closed step starts it.")
    past = [stair for stair in curve.stairs if stair[0] <= curve.now]
    coming = curve.stairs[len(past) :]
    now = past[-1][1] if past else 1.0
    past.append((curve.now, now))
    plan = [(curve.now, now), *coming]
    plan.append((curve.end, plan[-1][1]))
    advised = "advised (shadow mode: the trainer gets 1.0)" if curve.shadow else "advised"
    traces = [
        _stairs(past, advised, drawing.SERIES[0], "solid"),
        _stairs(plan, "as planned", drawing.SERIES[0], "dot"),
    ]
    if curve.acknowledged:
        traces.append({
            "type": "scatter", "mode": "markers", "name": "applied, as the trainer reported",
            "x": [step for step, _ in curve.acknowledged], "y": [scale for _, scale in curve.acknowledged],
            "marker": {"color": drawing.SERIES[1], "symbol": "diamond", "size": 8}, "hovertemplate": "%{y:.3g}",
        })  # fmt: skip
    # The label is above the staircase, or below it if the staircase is high.
    row = 0.12 if now > 0.5 else 1.0
    shape, label = drawing.vertical_marker(
        curve.now, f"now, {curve.now}", drawing.MUTED, row=row, left=curve.now > 0.7 * curve.end
    )
    layout = {
        "xaxis": drawing.step_axis(range=[0, curve.end]),
        "yaxis": {"title": {"text": "scale"}, "range": [0, 1.08], "tickvals": [0, 0.1, 0.25, 0.5, 1], "zeroline": True},
        "shapes": [shape],
        "annotations": [label],
    }
    effect = "Shadow mode: the trainer gets 1.0." if curve.shadow else "Apply mode: the trainer gets this scale."
    caption = f"The scale multiplies the trainer's own schedule. {effect}"
    change = f"Next change: {coming[0][1]:.3g} from step {coming[0][0]}." if coming else "No change is planned."
    summary = f"Scale {now:.3g} at step {curve.now}. {change}"
    return drawing.Figure(LEARNING_RATE_TITLE, caption, summary, traces, layout, height=260)


def _stairs(points: Sequence[tuple[int, float]], name: str, colour: str, dash: str) -> drawing.Json:
    curve = drawing.thinned(drawing.Curve(*zip(*points, strict=True)))
    return {
        "type": "scatter", "mode": "lines", "name": name, "x": curve.steps, "y": curve.values,
        "line": {"shape": "hv", "color": colour, "width": 2.5, "dash": dash}, "hovertemplate": "%{y:.3g}",
    }  # fmt: skip
