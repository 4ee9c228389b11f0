"""Text for terminals: numbers, tables, sparklines, colours, a line of progress."""

from __future__ import annotations

import itertools
import math
import os
import sys
import textwrap
import time
from collections.abc import Iterable, Sequence
from typing import Literal, TextIO

Style = Literal["bold", "dim", "good", "warning", "critical"]

WIDTH = 100
DASH = "–"
_LEVELS = "▁▂▃▄▅▆▇█"
# How a verdict or an alert's severity is painted.
STYLES: dict[str, Style | None] = {
    "healthy": "good",
    "warning": "warning",
    "critical": "critical",
    "unknown": "dim",
    "info": None,
}
_CODES: dict[Style, str] = {"bold": "1", "dim": "2", "good": "32", "warning": "33;1", "critical": "31;1"}


class Paint:
    """Colours, if the stream is a terminal and NO_COLOR is not set."""

    def __init__(self, stream: TextIO | None = None) -> None:
        stream = sys.stdout if stream is None else stream
        self._on = stream.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"

    def __call__(self, text: str, style: Style | None) -> str:
        return f"\x1b[{_CODES[style]}m{text}\x1b[0m" if self._on and style is not None else text


def number(value: float | None, digits: int = 3) -> str:
    """Format a number with `digits` significant digits, plain or scientific; a dash if it is missing or not finite."""
    if value is None or not math.isfinite(value):
        return DASH
    if value == 0:
        return "0"
    magnitude = abs(value)
    if 1e-3 <= magnitude < 1e5:
        decimals = max(0, digits - 1 - math.floor(math.log10(magnitude)))
        return f"{value:.{decimals}f}"
    mantissa, _, exponent = f"{value:.{digits - 1}e}".partition("e")
    return f"{mantissa}e{int(exponent)}"


def count(value: int | None) -> str:
    return DASH if value is None else f"{value:,}"


def sparkline(values: Sequence[float], width: int, *, logarithmic: bool = False) -> str:
    """Draw `values` as one line of blocks, at most `width` wide.

    A block shows the largest of its values, so that peaks stay visible, and is blank if none is finite.
    """
    if not values:
        return ""
    width = min(width, len(values))
    edges = [round(index * len(values) / width) for index in range(width + 1)]
    peaks = [
        max((value for value in values[start:end] if math.isfinite(value)), default=math.nan)
        for start, end in itertools.pairwise(edges)
    ]
    if logarithmic:
        peaks = [math.log10(peak) if peak > 0 else math.nan for peak in peaks]
    finite = [peak for peak in peaks if math.isfinite(peak)]
    if not finite:
        return " " * width
    low, high = min(finite), max(finite)
    span = high - low or 1.0
    # A constant is drawn in the middle, unless it is 0: at the bottom it would look like 0.
    flat = 3 if high else 0
    levels = [(peak - low) / span * 7 if high > low else peak * 0 + flat for peak in peaks]
    return "".join(" " if not math.isfinite(level) else _LEVELS[round(level)] for level in levels)


def table(
    header: Sequence[str], rows: Iterable[Sequence[str]], *, left: Sequence[int] = (0,), indent: str = "  "
) -> list[str]:
    """Return the lines of a table; columns are right-aligned, except those in `left`."""
    body = [list(row) for row in rows]
    widths = [max(len(row[column]) for row in [list(header), *body]) for column in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        aligned = [
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        return (indent + "  ".join(aligned)).rstrip()

    return [line(header), *(line(row) for row in body)]


def wrap(text: str, indent: str, first: str | None = None) -> list[str]:
    """Wrap `text` into lines of at most WIDTH, with `indent` (the first line with `first`)."""
    first = indent if first is None else first
    return textwrap.wrap(text, WIDTH, initial_indent=first, subsequent_indent=indent) or [""]


_WIDTH = 30
_SECONDS_BETWEEN_LINES = 5.0


class Progress:
    """A progress bar, `label ████░░░ 12/240`."""

    def __init__(self, label: str, total: int) -> None:
        self._label = label
        self._total = total
        self._terminal = sys.stderr.isatty()
        self._next = time.monotonic() + (0.0 if self._terminal else _SECONDS_BETWEEN_LINES)

    def show(self, done: int) -> None:
        """Show the progress, at most every 0.1 s (bar) or 5 s (lines)."""
        now = time.monotonic()
        if now < self._next and done < self._total:
            return
        self._next = now + (0.1 if self._terminal else _SECONDS_BETWEEN_LINES)
        if not self._terminal:
            print(f"{self._label}: {done}/{self._total}", file=sys.stderr, flush=True)
            return
        filled = round(_WIDTH * done / max(self._total, 1))
        drawn = "█" * filled + "░" * (_WIDTH - filled)
        end = "\n" if done >= self._total else ""
        print(f"\r{self._label} {drawn} {done}/{self._total}", end=end, file=sys.stderr, flush=True)
