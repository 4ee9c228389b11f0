"""Figures of the mismatch over steps, of one run and of several."""

import math
from collections.abc import Mapping, Sequence

from foreshock import comparisons, scorers
from foreshock.model_kind import ModelKind
from foreshock.ranges import ranges_note, required_range
from foreshock_service.present.pages.figures.drawing import (
    CRITICAL,
    CRITICAL_BAND,
    HEALTHY,
    HEALTHY_BAND,
    SERIES,
    SERIES_BAND,
    WARNING,
    WARNING_BAND,
    Curve,
    Figure,
    Json,
    Missing,
    line,
    scientific,
    step_axis,
)
from foreshock_service.present.pages.figures.overview import MOST_COLUMNS, columns_of

MISMATCH_TITLE = "Mismatch per token (k3)"

LOWEST_SHOWN = 3e-6
# The critical band is shown up to three times its threshold, even if no value lies there.
SHOWN_OF_CRITICAL = 3
MANY_DECADES = 1e7

# The same comparison has the same colour and dash on every page.
# A link has the colour of the scorer that it ends at, and the whole has that of its first scorer.
MAIN_COMPARISONS = scorers.main_comparisons()
DASHES = ("solid", "dot", "dash", "dashdot", "longdash", "longdashdot")


def style_of(comparison: str) -> tuple[str, str]:
    """Return (colour, dash) of a comparison's line."""
    if comparison not in MAIN_COMPARISONS:
        return SERIES[-1], "dot"
    target, behaviour = comparisons.split_comparison(comparison)
    scorer = scorers.SCORERS[behaviour if comparison == comparisons.TRAINER_ROLLOUT else target]
    return SERIES[scorer.colour - 1], DASHES[MAIN_COMPARISONS.index(comparison) % len(DASHES)]


def mismatch_figure(curves: Mapping[str, Curve], model_kind: ModelKind | None = None) -> Figure | Missing:
    """Return the mismatch over steps in front of the ranges of a kind of model.

    `curves`: k3_kl by comparison, in nats per token; an estimate of KL(μ‖π) only if the behaviour sampled.
    """
    there = [name for name in sorted(curves, key=known_first) if curves[name]]
    drawn = {name: curves[name] for name in shown_comparisons(there)}
    if not drawn:
        return Missing(
            MISMATCH_TITLE,
            "No step has log-probs of two scorers yet. "
            "Log trainer_log_probs beside rollout_log_probs, or probe a step that has a checkpoint.",
        )
    positive = [value for curve in drawn.values() for _, value in curve.points() if value > 0]
    low = min([*positive, LOWEST_SHOWN * 2]) / 2
    ranges = required_range("k3_kl", model_kind)
    warning, critical = ranges.warning, ranges.critical
    assert warning is not None
    assert critical is not None
    high = max([*positive, critical * SHOWN_OF_CRITICAL / 2]) * 2
    edges = (low, warning, critical, high)
    traces = [trace for name, curve in drawn.items() for trace in _traces(name, curve)]
    layout = {
        "xaxis": step_axis(),
        "yaxis": {
            "title": {"text": "k3, nats per token"},
            "type": "log",
            "range": [math.log10(low), math.log10(high)],
            "dtick": 1 if high / low < MANY_DECADES else 2,
            "exponentformat": "power",
        },
        "shapes": _bands(edges),
        "annotations": _band_names(edges[1:]),
    }
    return Figure(MISMATCH_TITLE, _caption(drawn, model_kind), _summary(drawn), traces, layout, height=380)


def shown_comparisons(names: Sequence[str]) -> list[str]:
    """Return the whole, its links and the float32 branch; if a run has none of them, all that it has."""
    return [name for name in names if name in MAIN_COMPARISONS] or list(names)


def known_first(comparison: str) -> tuple[int, str]:
    """Sorts comparisons in the order of reading: the whole, its links, side branches, then the rest by name."""
    known = comparison in MAIN_COMPARISONS
    return (MAIN_COMPARISONS.index(comparison) if known else len(MAIN_COMPARISONS), comparison)


def _traces(name: str, curve: Curve) -> list[Json]:
    colour, dash = style_of(name)
    # One click in the legend away, so that the chain itself can be read.
    hidden: Json = {"visible": "legendonly"} if comparisons.split_comparison(name)[0] == scorers.REFERENCE else {}
    # A log axis cannot show 0: the caption counts those steps.
    visible = Curve(curve.steps, [value if value is not None and value > 0 else None for value in curve.values])
    if len(visible.points()) <= MOST_COLUMNS:
        return [line(visible, name, colour, line={"dash": dash}, hovertemplate="%{y:.2e}", **hidden)]
    steps, means, low, high = columns_of(visible)
    edge = {"type": "scatter", "mode": "lines", "x": steps, "line": {"width": 0}, "hoverinfo": "skip", **hidden}
    edge |= {"showlegend": False, "legendgroup": name}
    mean = line(
        Curve([int(step) for step in steps], means), name, colour, line={"dash": dash}, hovertemplate="%{y:.2e}"
    )
    return [
        {**edge, "name": f"{name}, least", "y": low},
        {**edge, "name": f"{name}, largest", "y": high, "fill": "tonexty", "fillcolor": SERIES_BAND},
        {**mean, "legendgroup": name, **hidden},
    ]


def _bands(edges: Sequence[float]) -> list[Json]:
    bands = zip(edges, edges[1:], (HEALTHY_BAND, WARNING_BAND, CRITICAL_BAND), strict=False)
    return [
        {
            "type": "rect", "layer": "below", "xref": "paper", "x0": 0, "x1": 1, "yref": "y", "y0": bottom, "y1": top,
            "fillcolor": colour, "line": {"width": 0},
        }
        for bottom, top, colour in bands
    ]  # fmt: skip


def _band_names(tops: Sequence[float]) -> list[Json]:
    names = zip(tops, ("healthy", "warning", "critical"), (HEALTHY, WARNING, CRITICAL), strict=True)
    return [
        {
            "xref": "paper", "x": 1, "xanchor": "right", "yref": "y", "y": math.log10(top), "yanchor": "top",
            "text": text, "showarrow": False, "font": {"color": colour, "size": 12},
        }
        for top, text, colour in names
    ]  # fmt: skip


def _caption(curves: Mapping[str, Curve], model_kind: ModelKind | None) -> str:
    zeros = [
        f"{name} is exactly 0 at {count} of {len(points)} steps, which a log axis cannot show"
        for name, curve in curves.items()
        if (points := curve.points()) and (count := sum(value == 0 for _, value in points))
    ]
    bands = (
        "k3 per token, named target/behaviour. Against rollout, which sampled the tokens, it estimates KL(μ‖π); "
        "between other scores it is the size of a link, no KL. "
        f"{ranges_note('k3_kl', model_kind)}"
    )
    is_long = any(len(curve.points()) > MOST_COLUMNS for curve in curves.values())
    lines = ["Lines: the mean of neighbouring steps; bands: their range."] if is_long else []
    return " ".join([bands, *lines, *(f"{zero}." for zero in zeros)])


def _summary(curves: Mapping[str, Curve]) -> str:
    sentences = []
    for name, curve in curves.items():
        values = [value for _, value in curve.points()]
        last = curve.last()
        if last is not None:
            sentences.append(
                f"{name}: {scientific(last[1])} at step {last[0]}, between {scientific(min(values))} and "
                f"{scientific(max(values))} over {len(values)} steps."
            )
    return " ".join(sentences)


def comparison_figure(
    title: str, unit: str, curves: Sequence[tuple[str, Curve]], *, logarithmic: bool = False
) -> Figure | Missing:
    """Return a line for each run; `curves` in the order of the runs, which gives the colours."""
    shown = [(at, name, curve) for at, (name, curve) in enumerate(curves) if curve]
    if not shown:
        return Missing(title, "None of these runs logs it.")
    traces = [_line(at, name, curve, logarithmic) for at, name, curve in shown]
    axis: Json = {"title": {"text": unit}}
    if logarithmic:
        axis |= {"type": "log", "exponentformat": "power", "nticks": 6}
    absent = [name for name, curve in curves if not curve]
    caption = f"Not logged by {', '.join(absent)}." if absent else ""
    return Figure(title, caption, _comparison_summary(shown), traces, {"xaxis": step_axis(), "yaxis": axis})


def _line(at: int, name: str, curve: Curve, logarithmic: bool) -> Json:
    values = [None if value is None or (logarithmic and value <= 0) else value for value in curve.values]
    dash = DASHES[at // len(SERIES) % len(DASHES)]
    return line(
        Curve(curve.steps, values), name, SERIES[at % len(SERIES)], line={"dash": dash}, hovertemplate="%{y:.4g}"
    )


def _comparison_summary(shown: Sequence[tuple[int, str, Curve]]) -> str:
    newest = [(name, curve.points()[-1]) for _, name, curve in shown]
    return " ".join(f"{name}: {scientific(value)} at step {step}." for name, (step, value) in newest)
