"""The backtest as one self-contained HTML page: tables, a ROC for each rule, definitions."""

import html
from collections.abc import Sequence
from itertools import groupby

from foreshock.backtest.scoring import ALL_WARNINGS, BacktestResult, RocPoint, RunResult, Score

SCORE_HEADER = (
    "rule", "hits", "95 %", "lead", "false/armed", "per 1,000", "95 %", "healthy time in alarm", "95 % over runs",
)  # fmt: skip

_SIZE, _LEFT, _BOTTOM = 220, 46, 34
_STYLE = """
:root { color-scheme: light dark; --ink: #16202c; --muted: #5a6775; --rule: #dce1e7; --line: #0b66c2; --paper: #fff; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6ebf1; --muted: #9aa7b5; --rule: #2a343f; --line: #5aa9ff;
  --paper: #0f141a; } }
body { background: var(--paper); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; max-width: 1180px;
  margin: 0 auto; padding: 24px 20px; }
h1 { font-size: 24px; } h2 { font-size: 17px; margin: 28px 0 6px; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-size: 13.5px; }
th, td { border-bottom: 1px solid var(--rule); padding: 3px 10px 3px 0; text-align: right; vertical-align: top; }
th:first-child, td:first-child, td.text { text-align: left; overflow-wrap: anywhere; }
.curves { display: grid; grid-template-columns: repeat(auto-fit, minmax(240px, 1fr)); gap: 18px; }
figure { margin: 0; } svg { width: 100%; height: auto; } svg text { font-size: 10px; fill: var(--muted); }
.axis { stroke: var(--rule); } .roc { fill: none; stroke: var(--line); stroke-width: 1.6; }
circle { fill: var(--line); } circle.default { fill: var(--paper); stroke: var(--line); stroke-width: 2; }
.muted, figcaption { color: var(--muted); }
"""

_DEFINITIONS = """Collapse: the first observation from which, for at least 10 observations, the median of the trailing
five rewards is below half of (running best + floor). Hit: an episode that starts in [t − min(200, t/2), t − 3] of a
collapse at t. False alarm: an episode that starts in healthy time. Intervals of hits and false alarms are exact 95 %
ones; the one of healthy time in alarm is a bootstrap over runs. A collapse within the first ten observations is
unusable for a lead time. Runs are read row by row as if live."""


def render_page(result: BacktestResult) -> str:
    """Return the page. It has no script and loads nothing."""
    body = [
        "<h1>Backtest of early warnings</h1>",
        f"<p class=muted>{len(result.runs)} runs, {sum(len(each.run.steps) for each in result.runs)} observations.</p>",
        *(f"<p>{html.escape(line)}</p>" for line in answer_in_words(result)),
        "<h2>Runs</h2>", _table(RUN_HEADER, [run_cells(each) for each in result.runs]),
        "<h2>Rules</h2>", _table(SCORE_HEADER, [score_cells(each) for each in result.rules]),
        "<h2>Alarms that look at nothing, at an equal number of alarms</h2>",
        _table(SCORE_HEADER, [score_cells(each) for each in result.baselines]),
        "<h2>ROC</h2><p class=muted>The open circle is the default threshold.</p><div class=curves>",
        *(_curve(rule, list(points)) for rule, points in groupby(result.roc, key=lambda each: each.score.rule)),
        "</div>",
        f"<h2>Definitions</h2><p>{html.escape(_DEFINITIONS)}</p>",
    ]  # fmt: skip
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Foreshock backtest</title>'
        f"<style>{_STYLE}</style></head><body>{''.join(body)}</body></html>\n"
    )


def answer_in_words(result: BacktestResult) -> list[str]:
    """Return what the warnings are worth on these runs: collapses found, false alarms, and the learning rate lost."""
    found = next(each for each in result.rules if each.rule == ALL_WARNINGS)
    usable, healthy = found.hits + found.misses, [each for each in result.runs if each.run.collapse is None]
    lead = "" if found.median_lead is None else f", {found.median_lead:g} steps before in the median"
    unusable = sum(each.run.collapse is not None for each in result.runs) - usable
    left_out = f" ({unusable} more came too early to be judged)" if unusable else ""
    low, high = found.false_alarms_per_1000_interval
    rate = f"{found.false_alarms_per_1000:.2g} per 1,000 (95 %: {low:.2g} to {high:.2g})"
    taken = max((each.lost for each in healthy), default=0.0)
    return [
        f"{found.hits} of {usable} collapses warned of{lead}{left_out}."
        if usable
        else f"No collapse that could be warned of{left_out}.",
        f"{found.false_alarms} false alarms in {found.armed_observations:,} watched steps: {rate}.",
        f"Under apply, a run without a collapse would have lost at most {100 * taken:.1f} % of Σ η.",
    ]


RUN_HEADER = ("run", "steps", "collapse", "Σ η lost under apply", "alarms")


def run_cells(result: RunResult) -> list[str]:
    """Return the cells of a run, under `RUN_HEADER`."""
    run = result.run
    collapse = "none" if run.collapse is None else f"{run.collapse}{'' if run.usable else ', no baseline: unusable'}"
    alarms = ", ".join(f"{each.rule}@{each.start}" for each in run.episodes)
    return [run.name, str(len(run.steps)), collapse, f"{100 * result.lost:.1f} %", alarms or "none"]


def score_cells(score: Score) -> list[str]:
    """Return the cells of a score, under `SCORE_HEADER`."""
    low, high = score.false_alarms_per_1000_interval
    first, last = score.hit_rate_interval
    least, most = score.healthy_share_in_alarm_interval
    lead, collapses = score.median_lead, score.hits + score.misses
    return [
        score.rule,
        f"{score.hits}/{collapses}",
        f"{100 * first:.0f}-{100 * last:.0f} %" if collapses else "–",
        "–" if lead is None else f"{lead:g} ({min(score.leads)}-{max(score.leads)})",
        f"{score.false_alarms}/{score.armed_observations}",
        f"{score.false_alarms_per_1000:.2f}",
        f"{low:.2f}-{high:.2f}",
        f"{100 * score.healthy_share_in_alarm:.1f} %",
        f"{100 * least:.1f}-{100 * most:.1f} %",
    ]


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{html.escape(each)}</th>" for each in header)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<div class=wide><table><tr>{head}</tr>{body}</table></div>"


def _curve(rule: str, points: Sequence[RocPoint]) -> str:
    """Return the ROC of a rule: the share of collapses that it hits, over its false alarms per 1,000."""
    most = max(1.0, *(each.score.false_alarms_per_1000 for each in points))
    width = height = _SIZE

    def place(point: RocPoint) -> tuple[float, float]:
        collapses = point.score.hits + point.score.misses
        share = point.score.hits / collapses if collapses else 0.0
        return _LEFT + width * point.score.false_alarms_per_1000 / most, 10 + height * (1.0 - share)

    drawn = sorted(points, key=lambda each: each.score.false_alarms_per_1000)
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in map(place, drawn))
    circles = "".join(
        f"<circle class={'default' if each.strictness == 1.0 else 'other'} cx={x:.1f} cy={y:.1f} r=4>"
        f"<title>threshold × {each.strictness:g}: {each.score.hits} of {each.score.hits + each.score.misses} hit, "
        f"{each.score.false_alarms_per_1000:.2f} false alarms per 1,000</title></circle>"
        for each in drawn
        for x, y in [place(each)]
    )
    return (
        f'<figure><svg viewBox="0 0 {_LEFT + width + 14} {10 + height + _BOTTOM}" role="img" '
        f'aria-label="ROC of {html.escape(rule)}">'
        f'<path class=axis fill=none d="M{_LEFT} 10V{10 + height}H{_LEFT + width}"/>'
        f"<text x=2 y=16>all hit</text><text x=2 y={10 + height}>none</text>"
        f"<text x={_LEFT} y={24 + height}>0</text><text x={_LEFT + width} y={24 + height} text-anchor=end>"
        f"{most:.1f} false alarms per 1,000</text>"
        f'<polyline class=roc points="{line}"/>{circles}</svg><figcaption>{html.escape(rule)}</figcaption></figure>'
    )
