"""The report as one HTML page that needs no other file, with its curves as SVG."""

import html
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import itemgetter

from foreshock.api.watch import AlertRecord
from foreshock.commands import report_text
from foreshock.commands.report_data import ReportData
from foreshock.commands.text import Paint, moment, number
from foreshock.ranges import required_range, threshold_number

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
class Mark:
    """A line in the colour of `severity`, with a tooltip: a threshold at a value, or an alert at a step."""

    at: float
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
        share = (min(max(_place(value, self.logarithmic), self.low), self.high) - self.low) / (self.high - self.low)
        return _TOP + (1 - share) * (HEIGHT - _TOP - _BOTTOM)


def svg_curve(
    title: str,
    steps: Sequence[int],
    series: Sequence[Series],
    *,
    logarithmic: bool = False,
    thresholds: Sequence[Mark] = (),
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
        if scale.low <= _place(threshold.at, logarithmic) <= scale.high:
            y = scale.y(threshold.at)
            parts.append(
                f'<line class="threshold {threshold.severity}" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" '
                f'y2="{y:.1f}"><title>{html.escape(threshold.label)}</title></line>'
            )
    for mark in marks:
        if scale.first <= mark.at <= scale.last:
            x = scale.x(mark.at)
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
    """Return the place of a value on its axis; NaN if it has none."""
    if not math.isfinite(value) or (logarithmic and value <= 0):
        return math.nan
    return math.log10(value) if logarithmic else value


def _scale_of(steps: Sequence[int], series: Iterable[Series], logarithmic: bool) -> _Scale | None:
    """Return a scale that shows every value of the lines; bands may be cut."""
    places = (_place(value, logarithmic) for each in series for value in each.values)
    shown = [place for place in places if not math.isnan(place)]
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
    """Return the path of a line: the first, least, largest and last value of each column of pixels."""
    columns: dict[int, list[tuple[int, float]]] = {}
    for step, value in zip(steps, values, strict=True):
        if not math.isnan(_place(value, scale.logarithmic)):
            columns.setdefault(int(scale.x(step)), []).append((step, value))
    moves = []
    for inside in columns.values():
        least = min(inside, key=itemgetter(1))
        largest = max(inside, key=itemgetter(1))
        drawn = sorted({inside[0], least, largest, inside[-1]})
        moves += [f"{scale.x(step):.1f} {scale.y(value):.1f}" for step, value in drawn]
    if len(moves) == 1:
        return f"M{moves[0]}h0.01"  # a lone step is a dot
    return "M" + "L".join(moves)


def _band(scale: _Scale, steps: Sequence[int], low: Sequence[float], high: Sequence[float]) -> str:
    """Return the path of the area between two bounds, the widest of each column of pixels."""
    columns: dict[int, tuple[float, float]] = {}
    for step, lower, upper in zip(steps, low, high, strict=True):
        if not (math.isnan(_place(upper, scale.logarithmic)) or math.isnan(lower)):
            is_below = math.isnan(_place(lower, scale.logarithmic))
            bottom = float(HEIGHT - _BOTTOM) if is_below else scale.y(lower)
            top = scale.y(upper)
            before = columns.get(int(scale.x(step)), (top, bottom))
            columns[int(scale.x(step))] = min(top, before[0]), max(bottom, before[1])
    if not columns:
        return ""
    upper_edge = [f"{x} {top:.1f}" for x, (top, _) in columns.items()]
    lower_edge = [f"{x} {bottom:.1f}" for x, (_, bottom) in reversed(columns.items())]
    return "M" + "L".join(upper_edge + lower_edge) + "Z"


_LENGTHS = (("response_length_mean", "mean"), ("response_length_p99", "99th percentile"))
_SINGLE = (("reward_mean", "Reward"), ("entropy_mean", "Entropy, nats per token"), ("truncated_fraction", "Truncated"))
_CODE = re.compile(r"`([^`]+)`")
_STYLE = """
:root { color-scheme: light dark; --paper: #fff; --ink: #16202c; --muted: #5a6775; --rule: #dce1e7; --line-1: #0b66c2;
  --line-2: #c8500a; --band: #0b66c226; --healthy: #1a7340; --warning: #8a5a00; --critical: #b3261e; }
@media (prefers-color-scheme: dark) { :root { --paper: #0f141a; --ink: #e6ebf1; --muted: #9aa7b5; --rule: #2a343f;
  --line-1: #5aa9ff; --line-2: #ff9457; --band: #5aa9ff33; --healthy: #6fce95; --warning: #f0bb4a;
  --critical: #ff8d83; } }
body { background: var(--paper); color: var(--ink); font: 15px/1.5 system-ui, "Segoe UI", Roboto, Arial, sans-serif;
  max-width: 1180px; margin: 0 auto; padding: 24px 20px 48px; }
h1 { font-size: 24px; margin: 0; overflow-wrap: anywhere; } h2 { font-size: 17px; margin: 28px 0 6px; }
p { margin: 0 0 8px; } .muted, figcaption, svg text { color: var(--muted); fill: var(--muted); }
.verdict { border-left: 5px solid var(--rule); padding: 6px 14px; margin: 16px 0; font-size: 17px; }
.verdict.healthy { border-color: var(--healthy); } .verdict.warning { border-color: var(--warning); }
.verdict.critical { border-color: var(--critical); }
b.warning { color: var(--warning); } b.critical { color: var(--critical); }
.curves { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 420px), 1fr)); gap: 18px 26px; }
figure { margin: 0; min-width: 0; } figcaption b { color: var(--ink); }
svg { width: 100%; height: auto; display: block; }
svg text { font-size: 11px; } .grid { stroke: var(--rule); stroke-width: 1; }
.line { fill: none; stroke-width: 1.6; stroke-linejoin: round; stroke-linecap: round; } .band { fill: var(--band); }
.series-1 { stroke: var(--line-1); } .series-2 { stroke: var(--line-2); } .key-2 { color: var(--line-2); }
.key-1 { color: var(--line-1); }
.threshold { stroke-dasharray: 5 4; stroke-width: 1.2; } .mark { stroke-width: 1.2; opacity: 0.75; }
.threshold.warning, .mark.warning { stroke: var(--warning); }
.threshold.critical, .mark.critical { stroke: var(--critical); }
.mark.info { stroke: var(--muted); } details { margin: 6px 0; } summary { cursor: pointer; }
pre { overflow-x: auto; font-size: 12.5px; line-height: 1.35; }
"""


def render_page(report: ReportData) -> str:
    """Return the page. It has no script and loads nothing, so that it may be sent and opened anywhere."""
    run = report.run
    title, url = html.escape(f"{run.title}: report by Foreshock"), html.escape(report.url)
    text = "\n".join(report_text.render(report, Paint.off()))
    described = " · ".join(
        html.escape(value)
        for value in (run.project, run.model, run.trainer, run.engine, run.hardware, run.state)
        if value
    )
    body = [
        f"<h1>{html.escape(run.title)}</h1>",
        f'<p class="muted">{described}; newest data {html.escape(moment(run.updated_at_us))}</p>',
        *([f'<p class="muted">{html.escape(report.kind_note)}</p>'] if report.kind_note else []),
        _verdict(report),
        f'<div class="curves">{"".join(_figures(report))}</div>',
        _cause(report),
        _alerts(report.standing_alerts),
        "<h2>The whole report, as text</h2>",
        f"<details><summary>Show it</summary><pre>{html.escape(text)}</pre></details>",
        f'<p class="muted">The page of the run: <a href="{url}">{url}</a></p>',
    ]
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{_STYLE}</style></head>\n<body>\n" + "\n".join(body) + "\n</body></html>\n"
    )


def _verdict(report: ReportData) -> str:
    """Return the headline in the colour of the verdict, and the parts of the diagnosis below it."""
    found = report.diagnosis
    parts = "".join(
        f"<h2>{title}</h2><ul>{''.join(f'<li>{_words(sentence)}</li>' for sentence in sentences)}</ul>"
        for title, sentences in found.parts().items()
    )
    return f'<div class="verdict {found.verdict}">{_words(found.headline)}</div>{parts}'


def _figures(report: ReportData) -> list[str]:
    mismatch, rollouts = report.mismatch, report.rollouts
    marks = [
        Mark(each.step, each.severity, f"{each.severity}: {each.rule}, step {each.step}, {each.state}")
        for each in report.standing_alerts
    ]
    found = []
    if mismatch.known("k3_kl"):
        band = (mismatch.of("k3_kl_bootstrap_low"), mismatch.of("k3_kl_bootstrap_high"))
        known = required_range("k3_kl", report.model_kind)
        is_mixed = report.newest_lags.is_mixed
        at = " at lag 0" if is_mixed else ""
        limits = [
            Mark(value, severity, f"{severity} above {number(value)}{at}")
            for severity, value in (("warning", known.warning), ("critical", known.critical))
            if value is not None
        ]
        k3 = [Series("all lags" if is_mixed else "k3", mismatch.of("k3_kl"), *band)]
        keys = "log scale; the band is its range"
        if is_mixed:
            # The thresholds are for these tokens.
            k3.append(Series("lag 0", report.at_lag_zero("k3_kl")))
            keys = f"log scale; {_keys(k3)}, for which the thresholds hold; the band is the range of k3 at all lags"
        curve = svg_curve("k3 per token", mismatch.steps, k3, logarithmic=True, thresholds=limits, marks=marks)
        found.append(_figure("Mismatch: k3 per token of trainer/rollout, in nats", keys, curve))
    lengths = [
        Series(rollouts.label(name, label), rollouts.of(name)) for name, label in _LENGTHS if rollouts.known(name)
    ]
    if lengths:
        curve = svg_curve("Response length", rollouts.steps, lengths, marks=marks)
        found.append(_figure("Response length, tokens", _keys(lengths), curve))
    for name, label in _SINGLE:
        if rollouts.known(name):
            label = rollouts.label(name, label)
            curve = svg_curve(label, rollouts.steps, [Series(label, rollouts.of(name))], marks=marks)
            found.append(_figure(label, "", curve))
    return [figure for figure in found if figure] or ["<p>No step is complete yet.</p>"]


def _keys(series: Sequence[Series]) -> str:
    """Return the names of the lines, each in its colour."""
    return ", ".join(f'<b class="key-{place}">{each.label}</b>' for place, each in enumerate(series, start=1))


def _figure(title: str, note: str, curve: str) -> str:
    aside = f" ({note})" if note else ""
    return f"<figure><figcaption><b>{html.escape(title)}</b>{aside}</figcaption>{curve}</figure>" if curve else ""


def _cause(report: ReportData) -> str:
    """Return the conclusions on the newest probed step; empty without one."""
    if not report.attributions:
        return ""
    newest = report.attributions[-1]
    lines = "".join(f"<p>{_words(conclusion.sentence)}</p>" for conclusion in newest.conclusions)
    return f"<h2>Where the mismatch comes from: step {newest.step}</h2>{lines or '<p>No conclusion can be drawn.</p>'}"


def _alerts(shown: Sequence[AlertRecord]) -> str:
    if not shown:
        return "<h2>Alerts</h2><p>No alert has fired.</p>"
    items = []
    for each in shown:
        value = f", value {number(each.value)}" if math.isfinite(each.value) else ""
        head = f"{html.escape(each.rule)}, step {each.step}, {html.escape(each.state)}{value}"
        severity = html.escape(each.severity)
        text = "".join(f"<p>{_words(line)}</p>" for line in (each.why, each.what_to_do) if line)
        items.append(f'<details><summary><b class="{severity}">{severity}</b> {head}</summary>{text}</details>')
    return "<h2>Alerts</h2>" + "".join(items)


def _words(sentence: str) -> str:
    """Return a sentence as HTML; text between backticks is code."""
    return _CODE.sub(r"<code>\1</code>", html.escape(sentence))
