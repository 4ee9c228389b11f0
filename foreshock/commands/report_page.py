"""The report as one HTML page that needs nothing beside it: verdict, curves, cause, alerts, and the text."""

from __future__ import annotations

import html
import math
import re

from foreshock.api.watch import AlertRecord
from foreshock.commands import report_text
from foreshock.commands.diagnosis import Diagnosis
from foreshock.commands.svg_curve import Mark, Series, Threshold, svg_curve
from foreshock.commands.text import Paint, moment, number
from foreshock.ranges import range_of

__all__ = ["render_page"]

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


def render_page(diagnosis: Diagnosis) -> str:
    """Return the page. It has no script and loads nothing, so that it may be sent and opened anywhere."""
    run = diagnosis.run
    title, url = html.escape(f"{run.title}: report by Foreshock"), html.escape(diagnosis.url)
    described = " · ".join(
        html.escape(value)
        for value in (run.project, run.model, run.trainer, run.engine, run.hardware, run.state)
        if value
    )
    body = [
        f"<h1>{html.escape(run.title)}</h1>",
        f'<p class="muted">{described}; newest data {html.escape(moment(run.updated_at_us))}</p>',
        _verdict(diagnosis),
        f'<div class="curves">{"".join(_figures(diagnosis))}</div>',
        _cause(diagnosis),
        _alerts(diagnosis.alerts),
        "<h2>The whole report, as text</h2>",
        f"<details><summary>Show it</summary><pre>{html.escape(_text(diagnosis))}</pre></details>",
        f'<p class="muted">The page of the run: <a href="{url}">{url}</a></p>',
    ]
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{_STYLE}</style></head>\n<body>\n" + "\n".join(body) + "\n</body></html>\n"
    )


def _text(diagnosis: Diagnosis) -> str:
    return "\n".join(report_text.render(diagnosis, Paint.off()))


def _verdict(diagnosis: Diagnosis) -> str:
    """Return the service's sentences, the headline large, in the colour of the verdict."""
    sentences = diagnosis.health.sentences or ("No step has been judged yet.",)
    more = "".join(f"<p>{_words(sentence)}</p>" for sentence in sentences[1:])
    style = diagnosis.verdict.replace(" ", "-")
    return f'<div class="verdict {style}">{_words(sentences[0])}</div>{more}'


def _figures(diagnosis: Diagnosis) -> list[str]:
    mismatch, rollouts = diagnosis.mismatch, diagnosis.rollouts
    marks = [
        Mark(each.step, each.severity, f"{each.severity}: {each.rule}, step {each.step}, {each.state}")
        for each in _shown(diagnosis.alerts)
    ]
    found = []
    if mismatch.known("k3_kl"):
        band = (mismatch.of("k3_kl_bootstrap_low"), mismatch.of("k3_kl_bootstrap_high"))
        known = range_of("k3_kl", diagnosis.model_kind)
        lines = (("warning", known.warning), ("critical", known.critical)) if known is not None else ()
        limits = [
            Threshold(value, severity, f"{severity} above {number(value)}")
            for severity, value in lines
            if value is not None
        ]
        curve = svg_curve(
            "k3 per token", mismatch.steps, [Series("k3", mismatch.of("k3_kl"), *band)],
            logarithmic=True, thresholds=limits, marks=marks,
        )  # fmt: skip
        found.append(
            _figure("Mismatch: k3 per token of trainer/rollout, in nats", "log scale; the band is its range", curve)
        )
    lengths = [Series(label, rollouts.of(name)) for name, label in _LENGTHS if rollouts.known(name)]
    if lengths:
        keys = ", ".join(f'<b class="key-{place}">{each.label}</b>' for place, each in enumerate(lengths, start=1))
        curve = svg_curve("Response length", rollouts.steps, lengths, marks=marks)
        found.append(_figure("Response length, tokens", keys, curve))
    for name, label in _SINGLE:
        if rollouts.known(name):
            found.append(
                _figure(label, "", svg_curve(label, rollouts.steps, [Series(label, rollouts.of(name))], marks=marks))
            )
    return [figure for figure in found if figure] or ["<p>No step is complete yet.</p>"]


def _figure(title: str, note: str, curve: str) -> str:
    aside = f" ({note})" if note else ""
    return f"<figure><figcaption><b>{html.escape(title)}</b>{aside}</figcaption>{curve}</figure>" if curve else ""


def _cause(diagnosis: Diagnosis) -> str:
    """Return what the newest probed step says of the cause; nothing without one."""
    if not diagnosis.attributions:
        return ""
    newest = diagnosis.attributions[-1]
    lines = "".join(f"<p>{_words(sentence)}</p>" for sentence in newest.conclusions)
    return f"<h2>Where the mismatch comes from: step {newest.step}</h2>{lines or '<p>No conclusion can be drawn.</p>'}"


def _alerts(alerts: tuple[AlertRecord, ...]) -> str:
    shown = _shown(alerts)
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


def _shown(alerts: tuple[AlertRecord, ...]) -> list[AlertRecord]:
    return [alert for alert in alerts if alert.state != "retracted"]


def _words(sentence: str) -> str:
    """Return a sentence as HTML; text between backticks is code."""
    return _CODE.sub(r"<code>\1</code>", html.escape(sentence))
