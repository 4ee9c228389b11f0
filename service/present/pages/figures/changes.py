"""Marks of a run's changes in a figure over steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from foreshock_service.present.pages.figures.specification import (
    CRITICAL_BAND,
    MUTED,
    SERIES_BAND,
    WARNING_BAND,
    Figure,
    Json,
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
