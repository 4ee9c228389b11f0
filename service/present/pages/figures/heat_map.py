"""The mismatch by the probability of the token, over steps: a cell for each bucket and step.

The cells are bars. Plotly's heat map is a picture at a data address, which the pages' policy does not allow.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from foreshock_service.present.pages.figures.buckets import BY, behaviour_of, bucket_name
from foreshock_service.present.pages.figures.specification import Figure, Json, Missing, scientific, step_axis

TITLE = "Mismatch by token probability, over steps"
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


def heat_map_figure(columns: HeatMapColumns) -> Figure | Missing:
    """Return a cell for each bucket that has tokens, coloured by its mean |d|; cells without a mismatch are grey."""
    held = [bucket for bucket in range(len(columns.edges) - 1) if any(of_step[bucket] for of_step in columns.tokens)]
    if not held:
        return Missing(TITLE, MISSING)
    rows = range(held[0], held[-1] + 1)
    names = [bucket_name(BY["probability"], columns.edges[row], columns.edges[row + 1]) for row in rows]
    cells = _cells(columns, rows, names)
    coloured = [cell for cell in cells if cell.mean > 0]
    traces = [_bars("no mismatch", [cell for cell in cells if cell.mean == 0], {"color": "var(--rule)"})]
    if coloured:
        traces.append(_bars("mean |d|", coloured, _marker([math.log10(cell.mean) for cell in coloured])))
    layout: Json = {
        "xaxis": step_axis(rangemode="normal"),
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
    return Figure(TITLE, caption, _summary(cells), shown, layout, height=380, columns=values)


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


def _bars(name: str, cells: Sequence[_Cell], marker: Json) -> Json:
    return {
        "type": "bar", "name": name, "x": [cell.step for cell in cells], "width": [cell.width for cell in cells],
        "base": [cell.row - 0.5 for cell in cells], "y": [1] * len(cells),
        "marker": {"line": {"width": 0}, **marker},
        "hovertext": [
            f"step {cell.step}, probability {cell.bucket}<br>mean |d| {scientific(cell.mean)}, {cell.tokens:,} tokens"
            for cell in cells
        ],
        "hovertemplate": "%{hovertext}<extra></extra>",
    }  # fmt: skip


def _marker(exponents: Sequence[float]) -> Json:
    low, high = math.floor(min(exponents)), math.ceil(max(exponents))
    high = max(high, low + 1)
    ticks = list(range(low, high + 1))
    return {
        "color": [round(exponent, 3) for exponent in exponents], "colorscale": _COLOURS, "cmin": low, "cmax": high,
        "showscale": True,
        "colorbar": {
            "tickvals": ticks, "ticktext": [scientific(10.0**tick) for tick in ticks], "thickness": 10,
            "outlinewidth": 0, "title": {"text": "mean |d|", "side": "right"},
        },
    }  # fmt: skip


def _summary(cells: Sequence[_Cell]) -> str:
    worst = max(cells, key=lambda cell: cell.mean)
    return (
        f"Mean |d| is largest, {scientific(worst.mean)}, at step {worst.step} for tokens of probability "
        f"{worst.bucket} ({worst.tokens:,} tokens)."
    )
