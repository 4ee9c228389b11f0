"""Figures of one step: the links of the chain, and single tokens."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from textwrap import wrap

from foreshock_service.present.pages.figures import buckets, drawing, mismatch

ATTRIBUTION_TITLE = "Where the mismatch comes from"
ROW_HEIGHT = 74
# Characters; a longer cause is wrapped, so that it fits on a narrow screen.
LONGEST_LINE = 40


@dataclass(frozen=True, slots=True)
class LinkShare:
    """A link of the chain, `target/behaviour`: its cause in words, its share E[d_link·d]/E[d²] and an interval."""

    name: str
    cause: str
    share: float | None
    low: float | None
    high: float | None

    @property
    def short_cause(self) -> str:
        """The cause up to its colon; the rest is an explanation."""
        return self.cause.partition(":")[0]


@dataclass(frozen=True, slots=True)
class Chain:
    """The links of a step from `rollout` to `trainer`, in order, and conclusions and notes for the caption."""

    step: int
    links: Sequence[LinkShare]
    notes: Sequence[str] = ()


def attribution_figure(chain: Chain | str | None) -> drawing.Figure | drawing.Missing:
    """Return the stacked bars of the links; a bar to the left is a link that cancels part of another.

    `chain` may be the reason why the step has no chain, or None if nothing was replayed.
    """
    if isinstance(chain, str):
        return drawing.Missing(ATTRIBUTION_TITLE, chain)
    if chain is None:
        return drawing.Missing(
            ATTRIBUTION_TITLE,
            "Nothing has been replayed yet. Announce a checkpoint and request a probe; "
            "a worker then scores the rollouts with every scorer of the chain.",
        )
    known = [link for link in chain.links if link.share is not None]
    if not known:
        return drawing.Missing(ATTRIBUTION_TITLE, " ".join([f"Step {chain.step}.", *chain.notes]))
    starts, reached = [], 0.0
    for link in known:
        starts.append(reached)
        reached += link.share or 0.0
    layout = {
        "xaxis": {
            "title": {"text": "share of the mismatch, E[d of the link · d] / E[d²]"},
            "tickformat": ".0%",
            "range": _range(known, starts),
        },
        # The names stand above their bars: they fit on a narrow screen.
        "yaxis": {"range": [len(known) - 0.6, -0.78], "visible": False},
        "showlegend": False,
        "hovermode": False,
        "shapes": _guides(known, starts),
        "annotations": [_name(row, link) for row, link in enumerate(known)],
    }
    caption = (
        "The shares of the links add up to 100 %; a negative share cancels part of another. Whiskers: the intervals."
    )
    caption = " ".join([f"Step {chain.step}.", *chain.notes, caption])
    traces = [_bars(known, starts), *_intervals(known, starts)]
    return drawing.Figure(
        ATTRIBUTION_TITLE, caption, _summary(known), traces, layout, height=90 + ROW_HEIGHT * len(known)
    )


def _bars(links: Sequence[LinkShare], starts: Sequence[float]) -> drawing.Json:
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


def _name(row: int, link: LinkShare) -> drawing.Json:
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


def _guides(links: Sequence[LinkShare], starts: Sequence[float]) -> list[drawing.Json]:
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
    return ends + steps if links else []


def percent(share: float | None) -> str:
    """Return a share as a person reads it: whole percents, a real minus sign, no negative zero."""
    if share is None:
        return "not estimable"
    text = f"{100 * share:.0f}"
    return ("0" if text == "-0" else text.replace("-", "−")) + " %"


def _intervals(links: Sequence[LinkShare], starts: Sequence[float]) -> list[drawing.Json]:
    rows = [
        (row, start + (link.share or 0.0), start + link.low, start + link.high)
        for row, (link, start) in enumerate(zip(links, starts, strict=True))
        if link.low is not None and link.high is not None
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


def _range(links: Sequence[LinkShare], starts: Sequence[float]) -> list[float]:
    ends = [
        start + edge
        for link, start in zip(links, starts, strict=True)
        for edge in (0.0, link.share, link.low, link.high)
        if edge is not None
    ]
    low, high = min([0.0, *ends]), max([1.0, *ends])
    margin = 0.03 * (high - low)
    return [low - margin, high + margin]


def _summary(links: Sequence[LinkShare]) -> str:
    parts = []
    for link in links:
        known = link.low is not None and link.high is not None
        interval = f", interval {percent(link.low)} to {percent(link.high)}" if known else ""
        parts.append(f"{link.short_cause} ({link.name}): {percent(link.share)}{interval}.")
    return " ".join(parts)


TOKENS_TITLE = "Single tokens"
_DIGITS = 4


@dataclass(frozen=True, slots=True)
class TokenPoints:
    """Tokens of one comparison at one step, [S]; `log_behaviour` and `d` in nats.

    `drawn`: where they were drawn from, in words.
    """

    comparison: str
    step: int
    log_behaviour: Sequence[float]
    d: Sequence[float]
    drawn: str


def token_figure(points: TokenPoints) -> drawing.Figure | drawing.Missing:
    """Return |d| against the probability, both on log axes, with a series for each sign of d."""
    if not points.d:
        return drawing.Missing(TOKENS_TITLE, "No token of this step has two finite log-probs.")
    pairs = [(_rounded(math.exp(low)), _rounded(d)) for low, d in zip(points.log_behaviour, points.d, strict=True)]
    differing = [(probability, d) for probability, d in pairs if d != 0 and probability > 0]
    equal = sum(d == 0 for _, d in pairs)
    if not differing:
        return drawing.Missing(
            TOKENS_TITLE, f"The two scores are equal at all {len(pairs):,} sampled tokens. {points.drawn}"
        )
    behaviour = buckets.behaviour_of(points.comparison)
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
        f"{points.comparison} at step {points.step}, one point per token. d = log π − log μ. {points.drawn}{zeros} "
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
    """Return the value with as many digits as a plot can show."""
    return float(f"{value:.{_DIGITS}g}")
