"""Response length over steps: the mean in its quantile band, the length cap and the surge."""

from __future__ import annotations

from dataclasses import dataclass

from foreshock_service.present.pages.figures.specification import (
    CRITICAL,
    MUTED,
    SERIES,
    SERIES_BAND,
    Curve,
    Figure,
    Json,
    Missing,
    line,
    step_axis,
    vertical_marker,
)

TITLE = "Response length"


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
        return Missing(TITLE, "No rollouts have been uploaded for a closed step yet.")
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
    return Figure(TITLE, _caption(curves), _summary(curves), traces, layout)


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
