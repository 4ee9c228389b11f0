"""The figure of the learning-rate scale."""

from collections.abc import Sequence
from dataclasses import dataclass

from foreshock_service.present.pages.figures import drawing

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


def learning_rate_figure(curve: ScaleCurve | None) -> drawing.Figure | drawing.Missing:
    """Return a step curve in [0, 1], which multiplies the base schedule of the trainer."""
    if curve is None or not curve.stairs:
        return drawing.Missing(LEARNING_RATE_TITLE, "No advice yet: the first closed step starts it.")
    past = [(step, scale) for step, scale in curve.stairs if step <= curve.now]
    past.append((curve.now, _scale_at(curve.stairs, curve.now)))
    plan = [(curve.now, past[-1][1]), *((step, scale) for step, scale in curve.stairs if step > curve.now)]
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
    # The label is above the staircase, or below it while it is high.
    row = 0.12 if past[-1][1] > 0.5 else 1.0
    shape, label = drawing.vertical_marker(
        curve.now, f"now, {curve.now}", drawing.MUTED, row=row, left=curve.now > 0.7 * curve.end
    )
    layout = {
        "xaxis": drawing.step_axis(range=[0, curve.end]),
        "yaxis": {"title": {"text": "scale"}, "range": [0, 1.08], "tickvals": [0, 0.1, 0.25, 0.5, 1], "zeroline": True},
        "shapes": [shape],
        "annotations": [label],
    }
    return drawing.Figure(
        LEARNING_RATE_TITLE, _learning_rate_caption(curve), _learning_rate_summary(curve), traces, layout, height=260
    )


def _scale_at(stairs: Sequence[tuple[int, float]], step: int) -> float:
    return [scale for at, scale in stairs if at <= step][-1] if stairs and stairs[0][0] <= step else 1.0


def _stairs(points: Sequence[tuple[int, float]], name: str, colour: str, dash: str) -> drawing.Json:
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
