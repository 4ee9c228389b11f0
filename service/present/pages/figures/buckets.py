"""The mismatch by a property of the token: its probability under the sampler, its position, its token id."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from foreshock_service.present.pages.figures.specification import SERIES, Figure, Json, Missing, scientific

TITLE = "Mismatch by token probability"


@dataclass(frozen=True, slots=True)
class By:
    """A property by which a figure has buckets: its texts, and True if it is a whole number."""

    choice: str
    axis: str
    hint: str
    is_count: bool
    not_logged: str = ""

    @property
    def title(self) -> str:
        """The figure's title."""
        return f"Mismatch by {self.choice}"


BY: dict[str, By] = {
    "probability": By(
        "token probability",
        "probability under {behaviour}",
        "Numerical noise grows towards rare tokens. A bump at likely tokens has another cause.",
        is_count=False,
    ),
    "position": By(
        "position in the response",
        "tokens before it in the response",
        "Growth along the response indicates an error that accumulates, such as a quantised KV cache.",
        is_count=True,
    ),
    "turn": By(
        "turn",
        "turn",
        "A rise after the first turn indicates a difference in how tool output is inserted between turns.",
        is_count=True,
        not_logged="These rollouts have no turns. Log the column turn: the turn of each token.",
    ),
    "length": By(
        "response length",
        "tokens of the response that the model sampled",
        "If long responses differ more, compare with the position in the response.",
        is_count=True,
    ),
    "entropy": By(
        "entropy of the sampler",
        "entropy under {behaviour}, nats",
        "Numerical noise grows with entropy. A mismatch at low entropy has another cause.",
        is_count=False,
        not_logged="These rollouts have no entropies of the behaviour score. Log the column entropy.",
    ),
    "lag": By(
        "lag of the weights",
        "trainer weights version − the version that sampled",
        "The growth with lag is staleness; the mismatch at lag 0 is numerics.",
        is_count=True,
        not_logged="These rollouts have no version of the weights that sampled them. Log the column weights_version.",
    ),
}

TOKEN_ID_TITLE = "Mismatch by token id"
MOST_TOKEN_IDS = 40


@dataclass(frozen=True, slots=True)
class BucketColumns:
    """One comparison at one step. `edges`: B + 1 values of the condition `by`; the others: B values each."""

    comparison: str
    step: int
    edges: Sequence[float]
    tokens: Sequence[int]
    mean_abs_d: Sequence[float | None]
    max_abs_d: Sequence[float | None]
    by: str = "probability"


@dataclass(frozen=True, slots=True)
class TokenIdColumns:
    """One comparison at one step, the largest Σ k3 first; `k3_sum_missing`: how much larger a Σ k3 may be."""

    comparison: str
    step: int
    token_ids: Sequence[int]
    tokens: Sequence[int]
    k3_sum: Sequence[float]
    k3_sum_missing: Sequence[float]


def bucket_figure(columns: BucketColumns | None) -> Figure | Missing:
    """Return the mean and the largest |d| per bucket, above the number of tokens of each bucket."""
    if columns is None:
        return Missing(TITLE, "No closed step has log-probs of two scorers yet.")
    by = BY[columns.by]
    if not any(columns.tokens):
        return Missing(by.title, by.not_logged or "No token of this step has two finite log-probs.")
    held = [index for index, count in enumerate(columns.tokens) if count]
    shown = range(held[0], held[-1] + 1)
    names = [bucket_name(by, columns.edges[index], columns.edges[index + 1]) for index in shown]
    traces: list[Json] = [
        {
            "type": "bar", "name": "mean |d|", "x": names,
            "y": [_positive(columns.mean_abs_d[index]) for index in shown],
            "marker": {"color": SERIES[0]}, "hovertemplate": "%{y:.2e}",
        },
        {
            "type": "scatter", "mode": "markers", "name": "largest |d|", "x": names,
            "y": [_positive(columns.max_abs_d[index]) for index in shown],
            "marker": {"color": SERIES[1], "symbol": "line-ew-open", "size": 14, "line": {"width": 3}},
            "hovertemplate": "%{y:.2e}",
        },
        _token_bars(names, [columns.tokens[index] for index in shown]),
    ]  # fmt: skip
    axis = by.axis.format(behaviour=behaviour_of(columns.comparison))
    caption = f"{_caption(columns.comparison, columns.step)} {by.hint}"
    layout = _layout(axis, "|d|, nats", traces)
    return Figure(by.title, caption, _summary(by, columns, held), traces, layout, height=400)


def token_id_figure(columns: TokenIdColumns) -> Figure | Missing:
    """Return Σ k3 of the token ids that have the most of it, above the number of tokens of each."""
    shown = [index for index, total in enumerate(columns.k3_sum) if total > 0][:MOST_TOKEN_IDS]
    if not shown:
        return Missing(TOKEN_ID_TITLE, "No token of this step differs between the two scores.")
    names = [str(columns.token_ids[index]) for index in shown]
    missing = [columns.k3_sum_missing[index] for index in shown]
    bars: Json = {
        "type": "bar", "name": "Σ k3", "x": names, "y": [columns.k3_sum[index] for index in shown],
        "marker": {"color": SERIES[0]}, "hovertemplate": "%{y:.2e}",
    }  # fmt: skip
    if any(missing):
        bars["error_y"] = {"type": "data", "symmetric": False, "array": missing, "arrayminus": [0] * len(missing)}
    caption = (
        f"{_caption(columns.comparison, columns.step)} The ids with the largest Σ k3. A whisker is the most that ids "
        "dropped from a shard's table can add. A single id far above the rest, such as an end or a padding token, "
        "indicates an error of masking or of the template, not of numerics."
    )
    worst = shown[0]
    summary = (
        f"Token id {columns.token_ids[worst]} has the largest Σ k3, {scientific(columns.k3_sum[worst])} nats in "
        f"{columns.tokens[worst]} tokens."
    )
    traces = [bars, _token_bars(names, [columns.tokens[index] for index in shown])]
    return Figure(TOKEN_ID_TITLE, caption, summary, traces, _layout("token id", "Σ k3, nats", traces), height=400)


def _token_bars(names: Sequence[str], tokens: Sequence[int]) -> Json:
    return {
        "type": "bar", "name": "tokens", "x": names, "y": [count or None for count in tokens],
        "yaxis": "y2", "marker": {"color": SERIES[2]}, "hovertemplate": "%{y:,}",
    }  # fmt: skip


def _layout(axis: str, value: str, traces: Sequence[Json]) -> Json:
    """Return the layout: values above, tokens below, with few labels so that none overlap."""
    above = [each for trace in traces if "yaxis" not in trace for each in trace["y"]]
    below = [each for trace in traces if "yaxis" in trace for each in trace["y"]]
    return {
        "xaxis": {"title": {"text": axis}, "type": "category", "anchor": "y2", "tickangle": -38},
        "yaxis": _log_axis(value, [0.42, 1], above, labels=6),
        "yaxis2": _log_axis("tokens", [0, 0.32], below, labels=3),
        "bargap": 0.25,
    }


def _log_axis(title: str, domain: list[float], values: Sequence[float | None], labels: int) -> Json:
    exponents = [math.log10(value) for value in values if value and math.isfinite(value)]
    decades = max(exponents) - min(exponents) if exponents else 0.0
    return {
        "title": {"text": title},
        "type": "log",
        "domain": domain,
        "exponentformat": "power",
        "dtick": max(1, math.ceil(decades / labels)),
    }


def _caption(comparison: str, step: int) -> str:
    return f"{comparison} at step {step}. d = log π − log μ of each sampled token."


def behaviour_of(comparison: str) -> str:
    """Return the behaviour score of a comparison, whose probability gives the bucket: `rollout`."""
    return comparison.rpartition("/")[2]


def _positive(value: float | None) -> float | None:
    return value if value is not None and value > 0 else None


def bucket_name(by: By, low: float, high: float) -> str:
    """Return the name of the values from `low` to before `high`."""
    if by.is_count:
        return _count_name(low, high)
    if low == 0:
        return f"< {_short(high)}"
    if math.isinf(high):
        return f"≥ {_short(low)}"
    return f"{_short(low)}–{_short(high)}"


def _count_name(low: float, high: float) -> str:
    """Return the name of the whole numbers in [low, high)."""
    if math.isinf(low):
        return f"< {high:.0f}"
    if math.isinf(high):
        return f"≥ {low:.0f}"
    return f"{low:.0f}" if high - low == 1 else f"{low:.0f}–{high - 1:.0f}"


def _short(value: float) -> str:
    return f"{value:.2g}" if value >= 0.01 else scientific(float(f"{value:.1e}"))


def _summary(by: By, columns: BucketColumns, held: Sequence[int]) -> str:
    known = [(columns.mean_abs_d[index] or 0.0, index) for index in held]
    worst, index = max(known)
    bucket = bucket_name(by, columns.edges[index], columns.edges[index + 1])
    return (
        f"Mean |d| is largest, {scientific(worst)}, if the {by.choice.removeprefix('token ')} is {bucket} "
        f"({columns.tokens[index]} of {sum(columns.tokens)} tokens)."
    )
