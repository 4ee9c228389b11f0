"""Figures of the mismatch of a step by bucket and by token id."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from foreshock.measures.statistics import conditions, token_ids
from foreshock_service.present.pages.figures import drawing

TITLE = "Mismatch by token probability"
MISSING = "No closed step has log-probs of two scorers yet."


@dataclass(frozen=True, slots=True)
class By:
    """A property that defines a figure's buckets: its texts, and whether it is a whole number."""

    choice: str
    axis: str
    hint: str
    is_count: bool
    not_logged: str = ""

    @property
    def title(self) -> str:
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


def bucket_figure(
    comparison: str, step: int, by: By, table: conditions.BucketTable
) -> drawing.Figure | drawing.Missing:
    """Return the mean and the largest |d| per bucket, above the number of tokens of each bucket."""
    held = table.tokens.nonzero()[0].tolist()
    if not held:
        return drawing.Missing(by.title, by.not_logged or "No token of this step has two finite log-probs.")
    shown = slice(held[0], held[-1] + 1)
    every = [bucket_name(by, low, high) for low, high in pairwise(table.edges.tolist())]
    names = every[shown]
    tokens = table.tokens.tolist()
    traces: list[drawing.Json] = [
        {
            "type": "bar", "name": "mean |d|", "x": names,
            "y": _positive(table.mean_abs_d[shown]),
            "marker": {"color": drawing.SERIES[0]}, "hovertemplate": "%{y:.2e}",
        },
        {
            "type": "scatter", "mode": "markers", "name": "largest |d|", "x": names,
            "y": _positive(table.max_abs_d[shown]),
            "marker": {"color": drawing.SERIES[1], "symbol": "line-ew-open", "size": 14, "line": {"width": 3}},
            "hovertemplate": "%{y:.2e}",
        },
        _token_bars(names, tokens[shown]),
    ]  # fmt: skip
    worst, index = max((float(table.mean_abs_d[index]), index) for index in held)
    summary = (
        f"Mean |d| is largest, {drawing.scientific(worst)}, if the {by.choice.removeprefix('token ')} is "
        f"{every[index]} ({tokens[index]} of {sum(tokens)} tokens)."
    )
    layout = _layout(by.axis.format(behaviour=behaviour_of(comparison)), "|d|, nats", traces)
    return drawing.Figure(by.title, f"{_caption(comparison, step)} {by.hint}", summary, traces, layout, height=400)


def token_id_figure(comparison: str, step: int, table: token_ids.TokenIdTable) -> drawing.Figure | drawing.Missing:
    """Return Σ k3 of the token ids with the largest Σ k3, above the number of tokens of each."""
    # Rows are sorted by falling Σ k3: ids without a mismatch are last.
    end = int((table.k3_sum > 0).sum())
    if not end:
        return drawing.Missing(TOKEN_ID_TITLE, "No token of this step differs between the two scores.")
    names = [str(each) for each in table.token_ids[:end]]
    sums = table.k3_sum[:end].tolist()
    tokens = table.tokens[:end].tolist()
    missing = table.k3_sum_missing[:end].tolist()
    bars: drawing.Json = {
        "type": "bar", "name": "Σ k3", "x": names, "y": sums,
        "marker": {"color": drawing.SERIES[0]}, "hovertemplate": "%{y:.2e}",
    }  # fmt: skip
    if any(missing):
        bars["error_y"] = {"type": "data", "symmetric": False, "array": missing, "arrayminus": [0] * len(missing)}
    caption = (
        f"{_caption(comparison, step)} The ids with the largest Σ k3. A whisker is the most that ids "
        "dropped from a shard's table can add. A single id far above the rest, such as an end or a padding token, "
        "indicates an error of masking or of the template, not of numerics."
    )
    summary = f"Token id {names[0]} has the largest Σ k3, {drawing.scientific(sums[0])} nats in {tokens[0]} tokens."
    traces = [bars, _token_bars(names, tokens)]
    layout = _layout("token id", "Σ k3, nats", traces)
    return drawing.Figure(TOKEN_ID_TITLE, caption, summary, traces, layout, height=400)


def _token_bars(names: Sequence[str], tokens: Sequence[int]) -> drawing.Json:
    return {
        "type": "bar", "name": "tokens", "x": names, "y": [count or None for count in tokens],
        "yaxis": "y2", "marker": {"color": drawing.SERIES[2]}, "hovertemplate": "%{y:,}",
    }  # fmt: skip


def _layout(axis: str, value: str, traces: Sequence[drawing.Json]) -> drawing.Json:
    """Return the layout: values above, tokens below, with few enough labels that none overlap."""
    above = [each for trace in traces if "yaxis" not in trace for each in trace["y"]]
    below = [each for trace in traces if "yaxis" in trace for each in trace["y"]]
    return {
        "xaxis": {"title": {"text": axis}, "type": "category", "anchor": "y2", "tickangle": -38},
        "yaxis": _log_axis(value, [0.42, 1], above, labels=6),
        "yaxis2": _log_axis("tokens", [0, 0.32], below, labels=3),
        "bargap": 0.25,
    }


def _log_axis(title: str, domain: list[float], values: Sequence[float | None], labels: int) -> drawing.Json:
    return {"title": {"text": title}, "type": "log", "domain": domain, **drawing.log_axis(values, labels)}


def _caption(comparison: str, step: int) -> str:
    return f"{comparison} at step {step}. d = log π − log μ of each sampled token."


def behaviour_of(comparison: str) -> str:
    """Return the behaviour score of a comparison, such as `rollout`, whose probability selects the bucket."""
    return comparison.rpartition("/")[2]


def _positive(values: NDArray[np.float64]) -> list[float | None]:
    return [value if value > 0 else None for value in values.tolist()]


def bucket_name(by: By, low: float, high: float) -> str:
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
    return f"{value:.2g}" if value >= 0.01 else drawing.scientific(float(f"{value:.1e}"))
