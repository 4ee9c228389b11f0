"""Single tokens of a step: |d| against the probability of the token under the behaviour score."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from foreshock_service.present.pages.figures.buckets import behaviour_of
from foreshock_service.present.pages.figures.specification import SERIES, Figure, Json, Missing, scientific

TITLE = "Single tokens"
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


def token_figure(points: TokenPoints) -> Figure | Missing:
    """Return |d| against the probability, both on log axes, with a series for each sign of d."""
    if not points.d:
        return Missing(TITLE, "No token of this step has two finite log-probs.")
    pairs = [(_rounded(math.exp(low)), _rounded(d)) for low, d in zip(points.log_behaviour, points.d, strict=True)]
    differing = [(probability, d) for probability, d in pairs if d != 0 and probability > 0]
    equal = sum(d == 0 for _, d in pairs)
    if not differing:
        return Missing(TITLE, f"The two scores are equal at all {len(pairs):,} sampled tokens. {points.drawn}")
    behaviour = behaviour_of(points.comparison)
    traces = [
        _markers("π < μ", [(probability, -d) for probability, d in differing if d < 0], SERIES[1]),
        _markers("π > μ", [(probability, d) for probability, d in differing if d > 0], SERIES[0]),
    ]
    traces = [trace for trace in traces if trace["x"]]
    layout: Json = {
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
    return Figure(TITLE, caption, _summary(pairs), traces, layout, height=400, columns=columns)


def _log_axis(title: str, values: Sequence[float]) -> Json:
    axis: Json = {"title": {"text": title}, "type": "log", "exponentformat": "power"}
    # Within one decade the labels between the powers are needed.
    return {**axis, "dtick": 1} if max(values) > 10 * min(values) else axis


def _markers(name: str, points: Sequence[tuple[float, float]], colour: str) -> Json:
    return {
        "type": "scatter", "mode": "markers", "name": name,
        "x": [probability for probability, _ in points], "y": [size for _, size in points],
        "marker": {"color": colour, "size": 4, "opacity": 0.55},
        "hovertemplate": "probability %{x:.3g}, |d| %{y:.2e}",
    }  # fmt: skip


def _summary(pairs: Sequence[tuple[float, float]]) -> str:
    sizes = sorted(abs(d) for _, d in pairs)
    probability, largest = max(pairs, key=lambda pair: abs(pair[1]))
    lower = sum(d < 0 for _, d in pairs)
    return (
        f"Of {len(pairs):,} sampled tokens, half have |d| up to {scientific(sizes[(len(sizes) - 1) // 2])}; the "
        f"largest is {scientific(abs(largest))}, at probability {scientific(probability)}; {lower:,} have π < μ."
    )


def _rounded(value: float) -> float:
    """Return the value with as many digits as a plot can show."""
    return float(f"{value:.{_DIGITS}g}")
