"""Figures of one step: the links of the chain, and single tokens."""

import math
from collections.abc import Sequence
from textwrap import wrap

from foreshock.api.attribution import AttributionRecord, LinkRecord
from foreshock.diagnosis.wording import percent
from foreshock_service.present.pages.figures import buckets, drawing, mismatch

ATTRIBUTION_TITLE = "Where the mismatch comes from"
ROW_HEIGHT = 74
# Longest line in characters; a longer cause is wrapped, so that it fits on a narrow screen.
LONGEST_LINE = 40


def attribution_figure(
    read: AttributionRecord | str | None, notes: Sequence[str] = ()
) -> drawing.Figure | drawing.Missing:
    """Return the stacked bars of the links; a bar that points left is a link that cancels part of another link.

    `read` may be the reason why the step has no attribution, or None if nothing was replayed. `notes` join the caption.
    """
    if isinstance(read, str):
        return drawing.Missing(ATTRIBUTION_TITLE, read)
    if read is None:
        return drawing.Missing(
            ATTRIBUTION_TITLE,
            "Nothing has been replayed yet. Announce a checkpoint and request a probe; "
            "a worker then scores the rollouts with every scorer of the chain.",
        )
    words = " ".join([f"Step {read.step}.", *notes])
    known = [link for link in read.links if math.isfinite(link.share)]
    if not known:
        return drawing.Missing(ATTRIBUTION_TITLE, words)
    starts, reached = [], 0.0
    for link in known:
        starts.append(reached)
        reached += link.share
    layout = {
        "xaxis": {
            "title": {"text": "share of the mismatch, E[d of the link · d] / E[d²]"},
            "tickformat": ".0%",
            "range": _range(known, starts),
        },
        # Names stand above their bars, so that they fit on a narrow screen.
        "yaxis": {"range": [len(known) - 0.6, -0.78], "visible": False},
        "showlegend": False,
        "hovermode": False,
        "shapes": _guides(starts),
        "annotations": [_name(row, link) for row, link in enumerate(known)],
    }
    caption = (
        f"{words} The shares of the links add up to 100 %; a negative share cancels part of another. "
        "Whiskers: the intervals."
    )
    traces = [_bars(known, starts), *_intervals(known, starts)]
    return drawing.Figure(
        ATTRIBUTION_TITLE, caption, _summary(known), traces, layout, height=90 + ROW_HEIGHT * len(known)
    )


def _bars(links: Sequence[LinkRecord], starts: Sequence[float]) -> drawing.Json:
    return {
        "type": "bar",
        "orientation": "h",
        "name": "share",
        "y": list(range(len(links))),
        "x": [link.share for link in links],
        "base": list(starts),
        "width": 0.36,
        "marker": {"color": [mismatch.style_of(link.name)[0] for link in links]},
    }


def _name(row: int, link: LinkRecord) -> drawing.Json:
    words = "<br>".join(wrap(link.short_cause, LONGEST_LINE))
    return {
        "xref": "paper",
        "x": 0,
        "xanchor": "left",
        "yref": "y",
        "y": row - 0.2,
        "yanchor": "bottom",
        "showarrow": False,
        "align": "left",
        "bgcolor": "var(--card)",
        "borderpad": 1,
        "text": f"<b>{percent(link.share)}</b>  {words}",
        "font": {"color": drawing.INK, "size": 12.5},
    }


def _guides(starts: Sequence[float]) -> list[drawing.Json]:
    """Return lines at 0 and at the whole, and lines that join each bar to the next."""
    thin = {"color": drawing.MUTED, "width": 1, "dash": "dot"}
    ends = [
        {"type": "line", "xref": "x", "yref": "paper", "x0": at, "x1": at, "y0": 0, "y1": 1, "line": thin}
        for at in (0, 1)
    ]
    steps = [
        {"type": "line", "xref": "x", "yref": "y", "x0": at, "x1": at, "y0": row + 0.18, "y1": row + 0.82, "line": thin}
        for row, at in enumerate(starts[1:])
    ]
    return ends + steps


def _has_interval(link: LinkRecord) -> bool:
    return math.isfinite(link.share_low) and math.isfinite(link.share_high)


def share_in_words(link: LinkRecord) -> str:
    """Return the share of a link with its interval: `67 % (50 % to 80 %)`."""
    if not math.isfinite(link.share):
        return "not estimable"
    if not _has_interval(link):
        return percent(link.share)
    return f"{percent(link.share)} ({percent(link.share_low)} to {percent(link.share_high)})"


def _intervals(links: Sequence[LinkRecord], starts: Sequence[float]) -> list[drawing.Json]:
    rows = [
        (row, start + link.share, start + link.share_low, start + link.share_high)
        for row, (link, start) in enumerate(zip(links, starts, strict=True))
        if _has_interval(link)
    ]
    if not rows:
        return []
    return [
        {
            "type": "scatter",
            "mode": "markers",
            "y": [row for row, _, _, _ in rows],
            "x": [end for _, end, _, _ in rows],
            "marker": {"size": 1, "color": drawing.INK},
            "error_x": {
                "type": "data",
                "symmetric": False,
                "color": drawing.INK,
                "thickness": 1.5,
                "width": 5,
                "array": [max(high - end, 0.0) for _, end, _, high in rows],
                "arrayminus": [max(end - low, 0.0) for _, end, low, _ in rows],
            },
        }
    ]


def _range(links: Sequence[LinkRecord], starts: Sequence[float]) -> list[float]:
    ends = [
        start + edge
        for link, start in zip(links, starts, strict=True)
        for edge in (0.0, link.share, link.share_low, link.share_high)
        if math.isfinite(edge)
    ]
    low, high = min([0.0, *ends]), max([1.0, *ends])
    margin = 0.03 * (high - low)
    return [low - margin, high + margin]


def _summary(links: Sequence[LinkRecord]) -> str:
    parts = []
    for link in links:
        low, high = percent(link.share_low), percent(link.share_high)
        interval = f", interval {low} to {high}" if _has_interval(link) else ""
        parts.append(f"{link.short_cause} ({link.name}): {percent(link.share)}{interval}.")
    return " ".join(parts)


TOKENS_TITLE = "Single tokens"
_DIGITS = 4


def token_figure(
    comparison: str, step: int, log_behaviour: Sequence[float], d: Sequence[float], drawn: str
) -> drawing.Figure | drawing.Missing:
    """Return |d| against the probability, both on log axes, with a series for each sign of d.

    `log_behaviour` and `d` are those of S sampled tokens, [S], in nats. `drawn` says what they were sampled from.
    """
    if not d:
        return drawing.Missing(TOKENS_TITLE, "No token of this step has two finite log-probs.")
    pairs = [(_rounded(math.exp(low)), _rounded(each)) for low, each in zip(log_behaviour, d, strict=True)]
    differing = [(probability, d) for probability, d in pairs if d != 0 and probability > 0]
    equal = sum(d == 0 for _, d in pairs)
    if not differing:
        return drawing.Missing(TOKENS_TITLE, f"The two scores are equal at all {len(pairs):,} sampled tokens. {drawn}")
    behaviour = buckets.behaviour_of(comparison)
    traces = [
        _markers("π < μ", [(probability, -d) for probability, d in differing if d < 0], drawing.SERIES[1]),
        _markers("π > μ", [(probability, d) for probability, d in differing if d > 0], drawing.SERIES[0]),
    ]
    traces = [trace for trace in traces if trace["x"]]
    layout: drawing.Json = {
        "xaxis": _log_axis(f"probability under {behaviour}", [probability for probability, _ in differing]),
        "yaxis": _log_axis("|d|, nats", [abs(d) for _, d in differing]),
        "hovermode": "closest",
    }
    zeros = f" {equal:,} tokens with d = 0 are not drawn." if equal else ""
    caption = (
        f"{comparison} at step {step}, one point per token. d = log π − log μ. {drawn}{zeros} "
        "Rounding errors are larger at rare tokens, so their cloud rises to the left. Look at points far above it, "
        "and at a cloud that is mostly of one colour."
    )
    columns = {
        f"probability under {behaviour}": [probability for probability, _ in pairs],
        "d, nats": [d for _, d in pairs],
    }
    return drawing.Figure(TOKENS_TITLE, caption, _tokens_summary(pairs), traces, layout, height=400, columns=columns)


def _log_axis(title: str, values: Sequence[float]) -> drawing.Json:
    return {"title": {"text": title}, **drawing.log_axis(values)}


def _markers(name: str, points: Sequence[tuple[float, float]], colour: str) -> drawing.Json:
    return {
        "type": "scatter", "mode": "markers", "name": name,
        "x": [probability for probability, _ in points], "y": [size for _, size in points],
        "marker": {"color": colour, "size": 4, "opacity": 0.55},
        "hovertemplate": "probability %{x:.3g}, |d| %{y:.2e}",
    }  # fmt: skip


def _tokens_summary(pairs: Sequence[tuple[float, float]]) -> str:
    sizes = sorted(abs(d) for _, d in pairs)
    probability, largest = max(pairs, key=lambda pair: abs(pair[1]))
    lower = sum(d < 0 for _, d in pairs)
    return (
        f"Of {len(pairs):,} sampled tokens, half have |d| up to {drawing.scientific(sizes[(len(sizes) - 1) // 2])}; "
        f"the largest is {drawing.scientific(abs(largest))}, at probability {drawing.scientific(probability)}; "
        f"{lower:,} have π < μ."
    )


def _rounded(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")
