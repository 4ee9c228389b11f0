"""Figures of the mismatch by bucket, for a step and as a heat map over steps."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from foreshock_service.present.pages.figures import drawing

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


def bucket_figure(columns: BucketColumns | None) -> drawing.Figure | drawing.Missing:
    """Return the mean and the largest |d| per bucket, above the number of tokens of each bucket."""
    if columns is None:
        return drawing.Missing(TITLE, "No closed step has log-probs of two scorers yet.")
    by = BY[columns.by]
    if not any(columns.tokens):
        return drawing.Missing(by.title, by.not_logged or "No token of this step has two finite log-probs.")
    held = [index for index, count in enumerate(columns.tokens) if count]
    shown = range(held[0], held[-1] + 1)
    names = [bucket_name(by, columns.edges[index], columns.edges[index + 1]) for index in shown]
    traces: list[drawing.Json] = [
        {
            "type": "bar", "name": "mean |d|", "x": names,
            "y": [_positive(columns.mean_abs_d[index]) for index in shown],
            "marker": {"color": drawing.SERIES[0]}, "hovertemplate": "%{y:.2e}",
        },
        {
            "type": "scatter", "mode": "markers", "name": "largest |d|", "x": names,
            "y": [_positive(columns.max_abs_d[index]) for index in shown],
            "marker": {"color": drawing.SERIES[1], "symbol": "line-ew-open", "size": 14, "line": {"width": 3}},
            "hovertemplate": "%{y:.2e}",
        },
        _token_bars(names, [columns.tokens[index] for index in shown]),
    ]  # fmt: skip
    axis = by.axis.format(behaviour=behaviour_of(columns.comparison))
    caption = f"{_caption(columns.comparison, columns.step)} {by.hint}"
    layout = _layout(axis, "|d|, nats", traces)
    return drawing.Figure(by.title, caption, _summary(by, columns, held), traces, layout, height=400)


def token_id_figure(columns: TokenIdColumns) -> drawing.Figure | drawing.Missing:
    """Return Σ k3 of the token ids that have the most of it, above the number of tokens of each."""
    shown = [index for index, total in enumerate(columns.k3_sum) if total > 0][:MOST_TOKEN_IDS]
    if not shown:
        return drawing.Missing(TOKEN_ID_TITLE, "No token of this step differs between the two scores.")
    names = [str(columns.token_ids[index]) for index in shown]
    missing = [columns.k3_sum_missing[index] for index in shown]
    bars: drawing.Json = {
        "type": "bar", "name": "Σ k3", "x": names, "y": [columns.k3_sum[index] for index in shown],
        "marker": {"color": drawing.SERIES[0]}, "hovertemplate": "%{y:.2e}",
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
        f"Token id {columns.token_ids[worst]} has the largest Σ k3, {drawing.scientific(columns.k3_sum[worst])} nats "
        f"in {columns.tokens[worst]} tokens."
    )
    traces = [bars, _token_bars(names, [columns.tokens[index] for index in shown])]
    return drawing.Figure(
        TOKEN_ID_TITLE, caption, summary, traces, _layout("token id", "Σ k3, nats", traces), height=400
    )


def _token_bars(names: Sequence[str], tokens: Sequence[int]) -> drawing.Json:
    return {
        "type": "bar", "name": "tokens", "x": names, "y": [count or None for count in tokens],
        "yaxis": "y2", "marker": {"color": drawing.SERIES[2]}, "hovertemplate": "%{y:,}",
    }  # fmt: skip


def _layout(axis: str, value: str, traces: Sequence[drawing.Json]) -> drawing.Json:
    """Return the layout: values above, tokens below, with few labels so that none overlap."""
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
    return f"{value:.2g}" if value >= 0.01 else drawing.scientific(float(f"{value:.1e}"))


def _summary(by: By, columns: BucketColumns, held: Sequence[int]) -> str:
    known = [(columns.mean_abs_d[index] or 0.0, index) for index in held]
    worst, index = max(known)
    bucket = bucket_name(by, columns.edges[index], columns.edges[index + 1])
    return (
        f"Mean |d| is largest, {drawing.scientific(worst)}, if the {by.choice.removeprefix('token ')} is {bucket} "
        f"({columns.tokens[index]} of {sum(columns.tokens)} tokens)."
    )


HEAT_MAP_TITLE = "Mismatch by token probability, over steps"
MISSING = "No closed step has log-probs of two scorers yet."
_COLOURS = [[0, "var(--heat-low)"], [0.5, "var(--heat-middle)"], [1, "var(--heat-high)"]]


@dataclass(frozen=True, slots=True)
class HeatMapColumns:
    """One comparison at S of a run's `of_steps` steps. `edges`: B + 1 probabilities; `tokens`, `mean_abs_d`: [S][B]."""

    comparison: str
    steps: Sequence[int]
    of_steps: int
    edges: Sequence[float]
    tokens: Sequence[Sequence[int]]
    mean_abs_d: Sequence[Sequence[float]]


@dataclass(frozen=True, slots=True)
class _Cell:
    step: int
    width: float
    row: int
    bucket: str
    tokens: int
    mean: float


def heat_map_figure(columns: HeatMapColumns) -> drawing.Figure | drawing.Missing:
    """Return a cell for each bucket that has tokens, coloured by its mean |d|; cells without a mismatch are grey."""
    held = [bucket for bucket in range(len(columns.edges) - 1) if any(of_step[bucket] for of_step in columns.tokens)]
    if not held:
        return drawing.Missing(HEAT_MAP_TITLE, MISSING)
    rows = range(held[0], held[-1] + 1)
    names = [bucket_name(BY["probability"], columns.edges[row], columns.edges[row + 1]) for row in rows]
    cells = _cells(columns, rows, names)
    coloured = [cell for cell in cells if cell.mean > 0]
    traces = [_bars("no mismatch", [cell for cell in cells if cell.mean == 0], {"color": "var(--rule)"})]
    if coloured:
        traces.append(_bars("mean |d|", coloured, _marker([math.log10(cell.mean) for cell in coloured])))
    layout: drawing.Json = {
        "xaxis": drawing.step_axis(rangemode="normal"),
        "yaxis": {
            "title": {"text": f"probability under {behaviour_of(columns.comparison)}"},
            "range": [-0.5, len(rows) - 0.5], "tickmode": "array", "showgrid": False,
            "tickvals": list(range(len(rows)))[::2], "ticktext": names[::2],
        },
        "barmode": "overlay", "bargap": 0, "hovermode": "closest", "showlegend": False,
    }  # fmt: skip
    part = f" {len(columns.steps)} of {columns.of_steps:,} steps, equally far apart." if _is_part(columns) else ""
    caption = (
        f"{columns.comparison}: mean |d| of the tokens of each bucket, in nats; grey: no mismatch.{part} A row that "
        "darkens alone tells which tokens begin to differ."
    )
    values: dict[str, list[float | str | None]] = {
        "training step": [cell.step for cell in cells],
        "probability": [cell.bucket for cell in cells],
        "tokens": [cell.tokens for cell in cells],
        "mean |d|, nats": [cell.mean for cell in cells],
    }
    shown = [trace for trace in traces if trace["x"]]
    return drawing.Figure(HEAT_MAP_TITLE, caption, _heat_map_summary(cells), shown, layout, height=380, columns=values)


def _is_part(columns: HeatMapColumns) -> bool:
    return len(columns.steps) < columns.of_steps


def _cells(columns: HeatMapColumns, rows: range, names: Sequence[str]) -> list[_Cell]:
    """Return the cells that have tokens; each is as wide as the distance between steps."""
    distances = [later - earlier for earlier, later in pairwise(columns.steps)]
    width = sorted(distances)[len(distances) // 2] if distances else 1
    return [
        _Cell(step, width, row - rows.start, names[row - rows.start], tokens[row], means[row])
        for step, tokens, means in zip(columns.steps, columns.tokens, columns.mean_abs_d, strict=True)
        for row in rows
        if tokens[row]
    ]


def _bars(name: str, cells: Sequence[_Cell], marker: drawing.Json) -> drawing.Json:
    return {
        "type": "bar", "name": name, "x": [cell.step for cell in cells], "width": [cell.width for cell in cells],
        "base": [cell.row - 0.5 for cell in cells], "y": [1] * len(cells),
        "marker": {"line": {"width": 0}, **marker},
        "hovertext": [
            f"step {cell.step}, probability {cell.bucket}<br>"
            f"mean |d| {drawing.scientific(cell.mean)}, {cell.tokens:,} tokens"
            for cell in cells
        ],
        "hovertemplate": "%{hovertext}<extra></extra>",
    }  # fmt: skip


def _marker(exponents: Sequence[float]) -> drawing.Json:
    low, high = math.floor(min(exponents)), math.ceil(max(exponents))
    high = max(high, low + 1)
    ticks = list(range(low, high + 1))
    return {
        "color": [round(exponent, 3) for exponent in exponents], "colorscale": _COLOURS, "cmin": low, "cmax": high,
        "showscale": True,
        "colorbar": {
            "tickvals": ticks, "ticktext": [drawing.scientific(10.0**tick) for tick in ticks], "thickness": 10,
            "outlinewidth": 0, "title": {"text": "mean |d|", "side": "right"},
        },
    }  # fmt: skip


def _heat_map_summary(cells: Sequence[_Cell]) -> str:
    worst = max(cells, key=lambda cell: cell.mean)
    return (
        f"Mean |d| is largest, {drawing.scientific(worst.mean)}, at step {worst.step} for tokens of probability "
        f"{worst.bucket} ({worst.tokens:,} tokens)."
    )
