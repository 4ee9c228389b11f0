"""A curve over steps as SVG text: it needs no script and no file beside it."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from foreshock.commands.text import number
from foreshock.pixel_columns import drawn_points
from foreshock.ranges import threshold_number

__all__ = ["Mark", "Series", "Threshold", "svg_curve"]

WIDTH, HEIGHT = 560, 190
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 12, 12, 26
_COLUMNS = WIDTH - _LEFT - _RIGHT
_DECADES_AT_LEAST = 0.5


@dataclass(frozen=True, slots=True)
class Series:
    """One line: a value per step, NaN where there is none; `low` and `high` bound a band around it."""

    label: str
    values: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()


@dataclass(frozen=True, slots=True)
class Threshold:
    """A horizontal line at `value`, in the colour of `severity` ("warning" or "critical")."""

    value: float
    severity: str
    label: str


@dataclass(frozen=True, slots=True)
class Mark:
    """A vertical line at `step`, in the colour of `severity`, with a text for the pointer."""

    step: int
    severity: str
    label: str


@dataclass(frozen=True, slots=True)
class _Scale:
    """Maps steps and values to pixels."""

    first: int
    last: int
    low: float
    high: float
    logarithmic: bool

    def x(self, step: float) -> float:
        return _LEFT + (step - self.first) / max(1, self.last - self.first) * _COLUMNS

    def y(self, value: float) -> float:
        at = math.log10(value) if self.logarithmic else value
        share = (min(max(at, self.low), self.high) - self.low) / (self.high - self.low)
        return _TOP + (1 - share) * (HEIGHT - _TOP - _BOTTOM)

    def drawable(self, value: float) -> bool:
        return math.isfinite(value) and (value > 0 or not self.logarithmic)


def svg_curve(
    title: str,
    steps: Sequence[int],
    series: Sequence[Series],
    *,
    logarithmic: bool = False,
    thresholds: Sequence[Threshold] = (),
    marks: Sequence[Mark] = (),
) -> str:
    """Return an SVG element of the series, [len(steps)] each; empty text if no value can be drawn.

    Each column of pixels shows the least and the largest of its values, so that peaks stay visible in long runs. With
    `logarithmic`, values of 0 and below have no place and are left out; the band then ends at the lower edge.
    """
    scale = _scale_of(steps, series, logarithmic)
    if scale is None:
        return ""
    parts = [_axes(scale)]
    for threshold in thresholds:
        if scale.drawable(threshold.value) and scale.low <= _place(threshold.value, logarithmic) <= scale.high:
            y = scale.y(threshold.value)
            parts.append(
                f'<line class="threshold {threshold.severity}" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" '
                f'y2="{y:.1f}"><title>{html.escape(threshold.label)}</title></line>'
            )
    for mark in marks:
        if scale.first <= mark.step <= scale.last:
            x = scale.x(mark.step)
            parts.append(
                f'<line class="mark {mark.severity}" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{HEIGHT - _BOTTOM}">'
                f"<title>{html.escape(mark.label)}</title></line>"
            )
    for place, each in enumerate(series, start=1):
        if each.low:
            parts.append(f'<path class="band" d="{_band(scale, steps, each.low, each.high)}"/>')
        parts.append(f'<path class="line series-{place}" d="{_line(scale, steps, each.values)}"/>')
    label = html.escape(f"{title}, steps {steps[0]} to {steps[-1]}", quote=True)
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">{"".join(parts)}</svg>'


def _place(value: float, logarithmic: bool) -> float:
    return math.log10(value) if logarithmic else value


def _scale_of(steps: Sequence[int], series: Iterable[Series], logarithmic: bool) -> _Scale | None:
    """Return a scale that shows every value of the lines; bands may be cut."""
    shown = [
        _place(value, logarithmic)
        for each in series
        for value in each.values
        if math.isfinite(value) and (value > 0 or not logarithmic)
    ]
    if not shown:
        return None
    low, high = min(shown), max(shown)
    least = _DECADES_AT_LEAST if logarithmic else 0.02 * max(abs(low), abs(high)) or 1.0
    if high - low < least:
        low, high = (low + high - least) / 2, (low + high + least) / 2
    margin = (high - low) * 0.06
    return _Scale(steps[0], steps[-1], low - margin, high + margin, logarithmic)


def _axes(scale: _Scale) -> str:
    bottom = HEIGHT - _BOTTOM
    lines = []
    for value in _ticks(scale):
        y = scale.y(value)
        lines.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        lines.append(f'<text x="{_LEFT - 7}" y="{y + 4:.1f}" text-anchor="end">{_tick_text(value)}</text>')
    steps = sorted({round(scale.first + share * (scale.last - scale.first)) for share in (0, 0.25, 0.5, 0.75, 1)})
    for step in steps:
        anchor = "start" if step == scale.first else "end" if step == scale.last else "middle"
        lines.append(f'<text x="{scale.x(step):.1f}" y="{bottom + 18}" text-anchor="{anchor}">{step}</text>')
    return "".join(lines)


def _tick_text(value: float) -> str:
    """Return the shortest text of a tick; powers of ten below 0.01 as "1e-4"."""
    if value > 0 and math.isclose(value, 10.0 ** round(math.log10(value))):
        return threshold_number(value)
    text = number(value)
    return text.rstrip("0").rstrip(".") if "." in text and "e" not in text else text


def _ticks(scale: _Scale) -> list[float]:
    """Return about four round values; powers of ten on a logarithmic axis that spans two of them."""
    if scale.logarithmic:
        first, last = math.ceil(scale.low), math.floor(scale.high)
        if last - first >= 1:
            every = max(1, (last - first + 1) // 4)
            return [10.0**exponent for exponent in range(first, last + 1, every)]
        middle = (scale.low + scale.high) / 2
        return [10.0 ** (middle + offset * (scale.high - scale.low) / 3) for offset in (-1, 0, 1)]
    rough = (scale.high - scale.low) / 4
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= rough)
    first = math.ceil(scale.low / step)
    return [index * step for index in range(first, math.floor(scale.high / step) + 1)]


def _line(scale: _Scale, steps: Sequence[int], values: Sequence[float]) -> str:
    """Return the path of a line."""
    drawable = ((step, value) for step, value in zip(steps, values, strict=True) if scale.drawable(value))
    points = drawn_points(drawable, lambda step: int(scale.x(step)))
    moves = [f"{scale.x(step):.1f} {scale.y(value):.1f}" for step, value in points]
    if len(moves) == 1:
        return f"M{moves[0]}h0.01"  # a lone step is a dot
    return "M" + "L".join(moves)


def _band(scale: _Scale, steps: Sequence[int], low: Sequence[float], high: Sequence[float]) -> str:
    """Return the path of the area between two bounds, the widest of each column of pixels."""
    columns: dict[int, tuple[float, float]] = {}
    for step, lower, upper in zip(steps, low, high, strict=True):
        if math.isfinite(upper) and scale.drawable(upper) and not math.isnan(lower):
            bottom = scale.y(lower) if scale.drawable(lower) else float(HEIGHT - _BOTTOM)
            top = scale.y(upper)
            before = columns.get(int(scale.x(step)), (top, bottom))
            columns[int(scale.x(step))] = min(top, before[0]), max(bottom, before[1])
    if not columns:
        return ""
    upper_edge = [f"{x} {top:.1f}" for x, (top, _) in columns.items()]
    lower_edge = [f"{x} {bottom:.1f}" for x, (_, bottom) in reversed(columns.items())]
    return "M" + "L".join(upper_edge + lower_edge) + "Z"
