"""Marks of a run's changes in a figure over steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from service.present.pages.figures.specification import MUTED, Figure, Json

MOST_MARKS = 50
_MOST_NAMED = 3


@dataclass(frozen=True, slots=True)
class Mark:
    """A step at which something changed, and what, in a few words."""

    step: int
    text: str


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
