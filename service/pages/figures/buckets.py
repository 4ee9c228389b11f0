"""Where the mismatch sits: |d| by the probability that the sampler gave the token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from service.pages.figures.specification import SERIES, Figure, Json, Missing, scientific

TITLE = "Mismatch by token probability"


@dataclass(frozen=True, slots=True)
class BucketColumns:
    """One comparison at one step. `edges`: B + 1 probabilities under the behaviour; the others: B values each."""

    comparison: str
    step: int
    edges: Sequence[float]
    tokens: Sequence[int]
    mean_abs_d: Sequence[float | None]
    max_abs_d: Sequence[float | None]


def bucket_figure(columns: BucketColumns | None) -> Figure | Missing:
    """Mean and largest |d| per probability bucket, above the number of tokens that each bucket holds."""
    if columns is None or not any(columns.tokens):
        return Missing(TITLE, "No closed step has log-probs of two scorers yet.")
    held = [index for index, count in enumerate(columns.tokens) if count]
    shown = range(held[0], held[-1] + 1)
    names = [_bucket_name(columns.edges[index], columns.edges[index + 1]) for index in shown]
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
        {
            "type": "bar", "name": "tokens", "x": names, "y": [columns.tokens[index] or None for index in shown],
            "yaxis": "y2", "marker": {"color": SERIES[2]}, "hovertemplate": "%{y:,}",
        },
    ]  # fmt: skip
    layout = {
        "xaxis": {
            "title": {"text": f"probability under {behaviour_of(columns.comparison)}"},
            "type": "category", "anchor": "y2", "tickangle": -38,
        },
        "yaxis": _log_axis("|d|, nats", [0.42, 1]),
        "yaxis2": _log_axis("tokens", [0, 0.32]),
        "bargap": 0.25,
    }  # fmt: skip
    caption = (
        f"{columns.comparison} at step {columns.step}. d = log π − log μ of each sampled token. "
        "Numerical noise grows towards rare tokens; a bump among likely tokens points to something else."
    )
    return Figure(TITLE, caption, _summary(columns, held), traces, layout, height=400)


def _log_axis(title: str, domain: list[float]) -> Json:
    return {"title": {"text": title}, "type": "log", "domain": domain, "exponentformat": "power", "dtick": 1}


def behaviour_of(comparison: str) -> str:
    """`trainer/rollout` → `rollout`: the score whose probability dates the bucket."""
    return comparison.rpartition("/")[2]


def _positive(value: float | None) -> float | None:
    return value if value is not None and value > 0 else None


def _bucket_name(low: float, high: float) -> str:
    if low == 0:
        return f"< {_short(high)}"
    return f"{_short(low)}–{_short(high)}"


def _short(probability: float) -> str:
    return f"{probability:.2g}" if probability >= 0.01 else scientific(float(f"{probability:.1e}"))


def _summary(columns: BucketColumns, held: Sequence[int]) -> str:
    known = [(columns.mean_abs_d[index] or 0.0, index) for index in held]
    worst, index = max(known)
    bucket = _bucket_name(columns.edges[index], columns.edges[index + 1])
    return (
        f"Mean |d| is largest, {scientific(worst)}, where the probability is {bucket} "
        f"({columns.tokens[index]} of {sum(columns.tokens)} tokens)."
    )
