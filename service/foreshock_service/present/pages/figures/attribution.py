"""Figures of one step: the links of the chain, and single tokens."""

import math
from collections.abc import Sequence
from itertools import accumulate
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
    starts = [*accumulate((link.share for link in known[:-1]), initial=0.0)]
    certain = [
        (row, start + link.share, start + link.share_low, start + link.share_high)
        for row, (link, start) in enumerate(zip(known, starts, strict=True))
        if _has_interval(link)
    ]
    ends = [*starts, *(end for _, *edges in certain for end in edges), starts[-1] + known[-1].share, 0.0, 1.0]
    margin = 0.03 * (max(ends) - min(ends))
    thin = {"color": drawing.MUTED, "width": 1, "dash": "dot"}
    # Lines at 0 and at the whole, and lines that join each bar to the next.
    guides: list[drawing.Json] = [
        {"type": "line", "xref": "x", "yref": "paper", "x0": at, "x1": at, "y0": 0, "y1": 1, "line": thin}
        for at in (0, 1)
    ]
    guides += [
        {"type": "line", "xref": "x", "yref": "y", "x0": at, "x1": at, "y0": row + 0.18, "y1": row + 0.82, "line": thin}
        for row, at in enumerate(starts[1:])
    ]
    layout = {
        "xaxis": {
            "title": {"text": "share of the mismatch, E[d of the link · d] / E[d²]"},
            "tickformat": ".0%",
            "range": [min(ends) - margin, max(ends) + margin],
        },
        # Names stand above their bars, so that they fit on a narrow screen.
        "yaxis": {"range": [len(known) - 0.6, -0.78], "visible": False},
        "showlegend": False,
        "hovermode": False,
        "shapes": guides,
        "annotations": [_name(row, link) for row, link in enumerate(known)],
    }
    traces: list[drawing.Json] = [
        {
            "type": "bar", "orientation": "h", "name": "share", "y": list(range(len(known))),
            "x": [link.share for link in known], "base": starts, "width": 0.36,
            "marker": {"color": [mismatch.style_of(link.name)[0] for link in known]},
        },
    ]  # fmt: skip
    if certain:
        rows, reached, low, high = ([*each] for each in zip(*certain, strict=True))
        traces.append({
            "type": "scatter", "mode": "markers", "y": rows, "x": reached, "marker": {"size": 1, "color": drawing.INK},
            "error_x": {
                "type": "data", "symmetric": False, "color": drawing.INK, "thickness": 1.5, "width": 5,
                "array": [max(top - end, 0.0) for end, top in zip(reached, high, strict=True)],
                "arrayminus": [max(end - bottom, 0.0) for end, bottom in zip(reached, low, strict=True)],
            },
        })  # fmt: skip
    caption = (
        f"{words} The shares of the links add up to 100 %; a negative share cancels part of another. "
        "Whiskers: the intervals."
    )
    summary = " ".join(
        f"{link.short_cause} ({link.name}): {percent(link.share)}"
        + (f", interval {percent(link.share_low)} to {percent(link.share_high)}." if _has_interval(link) else ".")
        for link in known
    )
    height = 90 + ROW_HEIGHT * len(known)
    return drawing.Figure(ATTRIBUTION_TITLE, caption, summary, traces, layout, height=height)


def _name(row: int, link: LinkRecord) -> drawing.Json:
    words = "<br>".join(wrap(link.short_cause, LONGEST_LINE))
    return {
        "xref": "paper", "x": 0, "xanchor": "left", "yref": "y", "y": row - 0.2, "yanchor": "bottom", "align": "left",
        "showarrow": False, "bgcolor": "var(--card)", "borderpad": 1, "text": f"<b>{percent(link.share)}</b>  {words}",
        "font": {"color": drawing.INK, "size": 12.5},
    }  # fmt: skip


def _has_interval(link: LinkRecord) -> bool:
    return math.isfinite(link.share_low) and math.isfinite(link.share_high)


def share_in_words(link: LinkRecord) -> str:
    """Return the share of a link with its interval: `67 % (50 % to 80 %)`."""
    if not math.isfinite(link.share):
        return "not estimable"
    if not _has_interval(link):
        return percent(link.share)
    return f"{percent(link.share)} ({percent(link.share_low)} to {percent(link.share_high)})"


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
