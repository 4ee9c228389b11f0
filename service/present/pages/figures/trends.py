"""Figures over steps that are no mismatch: lengths, the learning rate, marks of changes."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from foreshock_service.present.pages.figures.drawing import (
    CRITICAL,
    CRITICAL_BAND,
    MUTED,
    SERIES,
    SERIES_BAND,
    WARNING_BAND,
    Curve,
    Figure,
    Json,
    Missing,
    line,
    step_axis,
    vertical_marker,
)

MOST_MARKS = 50
_MOST_NAMED = 3
BAND_COLOURS = {"critical": CRITICAL_BAND, "warning": WARNING_BAND}


@dataclass(frozen=True, slots=True)
class Mark:
    """A step at which something changed, and what, in a few words."""

    step: int
    text: str


@dataclass(frozen=True, slots=True)
class Band:
    """Steps during which an alert was open, both included."""

    first: int
    last: int
    severity: str


def with_bands(figure: Figure, bands: Sequence[Band], named: Sequence[Mark]) -> Figure:
    """Return the figure with the steps of alerts shaded, and a dashed line with its name at each of `named`."""
    shapes = [_band(band) for band in bands]
    annotations = list(figure.layout.get("annotations", []))
    for at, mark in enumerate(named):
        # At three heights: the names of steps that lie close together would cover each other.
        shape, label = vertical_marker(mark.step, mark.text, MUTED, row=0.08 + 0.08 * (at % 3))
        shapes.append(shape)
        annotations.append(label)
    if not shapes:
        return figure
    layout = {**figure.layout, "shapes": [*figure.layout.get("shapes", []), *shapes], "annotations": annotations}
    caption = f"{figure.caption} Shaded: steps with an open alert." if bands else figure.caption
    return replace(figure, layout=layout, caption=caption)


def _band(band: Band) -> Json:
    return {
        "type": "rect", "layer": "below", "xref": "x", "x0": band.first, "x1": max(band.last, band.first + 1),
        "yref": "paper", "y0": 0, "y1": 1, "line": {"width": 0},
        "fillcolor": BAND_COLOURS.get(band.severity, SERIES_BAND),
    }  # fmt: skip


def with_changes(figure: Figure, marks: Sequence[Mark]) -> Figure:
    """Return the figure with a dotted line at each of the newest marks, and what changed in its caption."""
    shown = marks[-MOST_MARKS:]
    if not shown:
        return figure
    layout = {**figure.layout, "shapes": [*figure.layout.get("shapes", []), *(_line(mark) for mark in shown)]}
    return replace(figure, layout=layout, caption=f"{figure.caption} {_in_words(marks)}")


def _line(mark: Mark) -> Json:
    return {
        "type": "line", "xref": "x", "yref": "paper", "x0": mark.step, "x1": mark.step, "y0": 0, "y1": 1,
        "layer": "below", "line": {"color": MUTED, "width": 1.5, "dash": "dot"},
    }  # fmt: skip


def _in_words(marks: Sequence[Mark]) -> str:
    named = "; ".join(f"step {mark.step}, {mark.text}" for mark in marks[-_MOST_NAMED:])
    others = len(marks) - _MOST_NAMED
    return f"Dotted: changes at {named}{f'; and {others} earlier ones' if others > 0 else ''}."


LENGTH_TITLE = "Response length"


@dataclass(frozen=True, slots=True)
class LengthCurves:
    """Lengths of model-generated tokens per rollout, before any filtering."""

    mean: Curve
    median: Curve
    ninetieth: Curve
    longest: Curve
    surge_step: int | None = None
    length_cap: int | None = None


def length_figure(curves: LengthCurves) -> Figure | Missing:
    """Return the length curve from which the decay schedule is derived."""
    if not curves.mean:
        return Missing(LENGTH_TITLE, "No rollouts have been uploaded for a closed step yet.")
    traces: list[Json] = []
    if curves.median and curves.ninetieth:
        # Plotly fills from a trace to the one before it, so the band's lower edge comes first.
        edge = {"type": "scatter", "mode": "lines", "line": {"width": 0, "color": SERIES[0]}, "hoverinfo": "skip"}
        traces = [
            {**edge, "x": list(curves.median.steps), "y": list(curves.median.values), "showlegend": False},
            {
                **edge, "x": list(curves.ninetieth.steps), "y": list(curves.ninetieth.values),
                "name": "median to 90th percentile", "fill": "tonexty", "fillcolor": SERIES_BAND,
            },
        ]  # fmt: skip
    traces.append(line(curves.mean, "mean", SERIES[0], hovertemplate="%{y:.1f}"))
    if curves.longest:
        longest = line(curves.longest, "longest", MUTED, line={"dash": "dot", "width": 1.2}, hovertemplate="%{y:.0f}")
        traces.append({**longest, "mode": "lines"})
    shapes, labels = _marks(curves)
    layout = {
        "xaxis": step_axis(),
        "yaxis": {"title": {"text": "tokens per response"}, "rangemode": "tozero"},
        "shapes": shapes,
        "annotations": labels,
    }
    return Figure(LENGTH_TITLE, _caption(curves), _summary(curves), traces, layout)


def _marks(curves: LengthCurves) -> tuple[list[Json], list[Json]]:
    shapes: list[Json] = []
    labels: list[Json] = []
    if curves.surge_step is not None:
        shape, label = vertical_marker(
            curves.surge_step, f"surge at {curves.surge_step}", CRITICAL, left=_is_late(curves)
        )
        shapes.append(shape)
        labels.append(label)
    if curves.length_cap is not None and _cap_is_near(curves):
        shapes.append({
            "type": "line", "xref": "paper", "x0": 0, "x1": 1,
            "yref": "y", "y0": curves.length_cap, "y1": curves.length_cap,
            "line": {"color": MUTED, "width": 1, "dash": "longdash"},
        })  # fmt: skip
        labels.append({
            "xref": "paper", "x": 1, "xanchor": "right", "yref": "y", "y": curves.length_cap, "yanchor": "bottom",
            "text": f"length cap {curves.length_cap}", "showarrow": False, "font": {"color": MUTED, "size": 12},
        })  # fmt: skip
    return shapes, labels


def _is_late(curves: LengthCurves) -> bool:
    last = curves.mean.last()
    return curves.surge_step is not None and last is not None and curves.surge_step > 0.7 * last[0]


def _cap_is_near(curves: LengthCurves) -> bool:
    """Return whether the cap is shown: far above every length it would flatten the curve."""
    values = [value for _, value in (curves.longest or curves.mean).points()]
    return curves.length_cap is not None and max(values) >= 0.5 * curves.length_cap


def _caption(curves: LengthCurves) -> str:
    surge = (
        f"The surge, the first confirmed crossing of twice the smoothed baseline, was at step {curves.surge_step}."
        if curves.surge_step is not None
        else "No surge so far: the mean has not crossed twice its smoothed baseline in steep growth."
    )
    return f"Model-generated tokens per rollout, before any filtering. {surge}"


def _summary(curves: LengthCurves) -> str:
    points = curves.mean.points()
    (first_step, first), (last_step, last) = points[0], points[-1]
    return f"Mean response length: {first:.1f} tokens at step {first_step}, {last:.1f} at step {last_step}."


LEARNING_RATE_TITLE = "Learning-rate scale"


@dataclass(frozen=True, slots=True)
class ScaleCurve:
    """The scale as a staircase: (step, scale from that step on), in step order; `now` divides past from plan."""

    stairs: Sequence[tuple[int, float]]
    now: int
    end: int
    shadow: bool
    acknowledged: Sequence[tuple[int, float]] = ()
    """(step, applied learning rate ÷ initial learning rate) as the trainer reported it."""


def learning_rate_figure(curve: ScaleCurve | None) -> Figure | Missing:
    """Return a step curve in [0, 1], which multiplies the base schedule of the trainer."""
    if curve is None or not curve.stairs:
        return Missing(LEARNING_RATE_TITLE, "No advice yet: the first closed step starts it.")
    past = [(step, scale) for step, scale in curve.stairs if step <= curve.now]
    past.append((curve.now, _scale_at(curve.stairs, curve.now)))
    plan = [(curve.now, past[-1][1]), *((step, scale) for step, scale in curve.stairs if step > curve.now)]
    plan.append((curve.end, plan[-1][1]))
    advised = "advised (shadow mode: the trainer gets 1.0)" if curve.shadow else "advised"
    traces = [
        _stairs(past, advised, SERIES[0], "solid"),
        _stairs(plan, "as planned", SERIES[0], "dot"),
    ]
    if curve.acknowledged:
        traces.append({
            "type": "scatter", "mode": "markers", "name": "applied, as the trainer reported",
            "x": [step for step, _ in curve.acknowledged], "y": [scale for _, scale in curve.acknowledged],
            "marker": {"color": SERIES[1], "symbol": "diamond", "size": 8}, "hovertemplate": "%{y:.3g}",
        })  # fmt: skip
    # The label is above the staircase, or below it while it is high.
    row = 0.12 if past[-1][1] > 0.5 else 1.0
    shape, label = vertical_marker(curve.now, f"now, {curve.now}", MUTED, row=row, left=curve.now > 0.7 * curve.end)
    layout = {
        "xaxis": step_axis(range=[0, curve.end]),
        "yaxis": {"title": {"text": "scale"}, "range": [0, 1.08], "tickvals": [0, 0.1, 0.25, 0.5, 1], "zeroline": True},
        "shapes": [shape],
        "annotations": [label],
    }
    return Figure(
        LEARNING_RATE_TITLE, _learning_rate_caption(curve), _learning_rate_summary(curve), traces, layout, height=260
    )


def _scale_at(stairs: Sequence[tuple[int, float]], step: int) -> float:
    return [scale for at, scale in stairs if at <= step][-1] if stairs and stairs[0][0] <= step else 1.0


def _stairs(points: Sequence[tuple[int, float]], name: str, colour: str, dash: str) -> Json:
    return {
        "type": "scatter", "mode": "lines", "name": name, "x": [step for step, _ in points],
        "y": [scale for _, scale in points], "line": {"shape": "hv", "color": colour, "width": 2.5, "dash": dash},
        "hovertemplate": "%{y:.3g}",
    }  # fmt: skip


def _learning_rate_caption(curve: ScaleCurve) -> str:
    effect = "Shadow mode: the trainer gets 1.0." if curve.shadow else "Apply mode: the trainer gets this scale."
    return f"The scale multiplies the trainer's own schedule. {effect}"


def _learning_rate_summary(curve: ScaleCurve) -> str:
    coming = [(step, scale) for step, scale in curve.stairs if step > curve.now]
    plan = f" Next change: {coming[0][1]:.3g} from step {coming[0][0]}." if coming else " No change is planned."
    return f"Scale {_scale_at(curve.stairs, curve.now):.3g} at step {curve.now}.{plan}"
