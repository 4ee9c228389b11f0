"""Curves of several runs by step: one colour for each run, and one dash for each six."""

from __future__ import annotations

from collections.abc import Sequence

from foreshock_service.present.pages.figures.mismatch import DASHES
from foreshock_service.present.pages.figures.specification import (
    SERIES,
    Curve,
    Figure,
    Json,
    Missing,
    line,
    scientific,
    step_axis,
)


def comparison_figure(
    title: str, unit: str, curves: Sequence[tuple[str, Curve]], *, logarithmic: bool = False
) -> Figure | Missing:
    """Return a line for each run; `curves` in the order of the runs, which gives the colours."""
    shown = [(at, name, curve) for at, (name, curve) in enumerate(curves) if curve]
    if not shown:
        return Missing(title, "None of these runs logs it.")
    traces = [_line(at, name, curve, logarithmic) for at, name, curve in shown]
    axis: Json = {"title": {"text": unit}}
    if logarithmic:
        axis |= {"type": "log", "exponentformat": "power", "nticks": 6}
    absent = [name for name, curve in curves if not curve]
    caption = f"Not logged by {', '.join(absent)}." if absent else ""
    return Figure(title, caption, _summary(shown), traces, {"xaxis": step_axis(), "yaxis": axis})


def _line(at: int, name: str, curve: Curve, logarithmic: bool) -> Json:
    values = [None if value is None or (logarithmic and value <= 0) else value for value in curve.values]
    dash = DASHES[at // len(SERIES) % len(DASHES)]
    return line(
        Curve(curve.steps, values), name, SERIES[at % len(SERIES)], line={"dash": dash}, hovertemplate="%{y:.4g}"
    )


def _summary(shown: Sequence[tuple[int, str, Curve]]) -> str:
    newest = [(name, curve.points()[-1]) for _, name, curve in shown]
    return " ".join(f"{name}: {scientific(value)} at step {step}." for name, (step, value) in newest)
