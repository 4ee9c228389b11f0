"""Figures of the mismatch over steps, of one run and of several."""

import math
from collections.abc import Mapping, Sequence

from foreshock import comparisons, scorers
from foreshock.healthy_ranges import ranges_note, required_range
from foreshock.model_kind import ModelKind
from foreshock_service.present.pages.figures import drawing, overview

MISMATCH_TITLE = "Mismatch per token (k3)"

LOWEST_SHOWN = 3e-6
# The critical band is shown up to this multiple of its threshold, even if no value lies there.
SHOWN_OF_CRITICAL = 3
MANY_DECADES = 1e7

# A comparison has the same colour and dash on every page.
# A link has the colour of its last scorer, the whole chain that of its first scorer.
MAIN_COMPARISONS = scorers.main_comparisons()
AT_LAG_ZERO = f"{comparisons.TRAINER_ROLLOUT} at lag 0"
DASHES = ("solid", "dot", "dash", "dashdot", "longdash", "longdashdot")


def style_of(comparison: str) -> tuple[str, str]:
    if comparison == AT_LAG_ZERO:
        return drawing.HEALTHY, "solid"
    if comparison not in MAIN_COMPARISONS:
        return drawing.SERIES[-1], "dot"
    target, behaviour = comparisons.split_comparison(comparison)
    scorer = scorers.SCORERS[behaviour if comparison == comparisons.TRAINER_ROLLOUT else target]
    return drawing.SERIES[scorer.colour - 1], DASHES[MAIN_COMPARISONS.index(comparison) % len(DASHES)]


def mismatch_figure(
    curves: Mapping[str, drawing.Curve], model_kind: ModelKind | None = None, at_lag_zero: drawing.Curve | None = None
) -> drawing.Figure | drawing.Missing:
    """Return the mismatch over steps, drawn over the healthy ranges of a kind of model.

    `curves`: k3_kl by comparison, in nats per token; it estimates KL(μ‖π) only if the behaviour sampled the tokens.
    `at_lag_zero`: k3_kl of trainer/rollout at lag 0, which the ranges judge, if other lags have tokens too.
    """
    there = [name for name in sorted(curves, key=known_first) if curves[name]]
    drawn = {name: curves[name] for name in shown_comparisons(there)}
    if not drawn:
        return drawing.Missing(
            MISMATCH_TITLE,
            "No step has log-probs of two scorers yet. "
            "Log trainer_log_probs beside rollout_log_probs, or probe a step that has a checkpoint.",
        )
    if at_lag_zero:
        drawn[AT_LAG_ZERO] = at_lag_zero
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
        "xaxis": drawing.step_axis(),
        "yaxis": {
            "title": {"text": "k3, nats per token"},
            "type": "log",
            "range": [math.log10(low), math.log10(high)],
            "dtick": 1 if high / low < MANY_DECADES else 2,
            "exponentformat": "e",
        },
        "shapes": _bands(edges),
        "annotations": _band_names(edges[1:]),
    }
    return drawing.Figure(MISMATCH_TITLE, _caption(drawn, model_kind), _summary(drawn), traces, layout, height=380)


def shown_comparisons(names: Sequence[str]) -> list[str]:
    """Return the names of the whole, its links and the float32 branch; if there are none of these, all names."""
    return [name for name in names if name in MAIN_COMPARISONS] or list(names)


def known_first(comparison: str) -> tuple[int, str]:
    """Return a sort key in reading order: the whole, its links, side branches, then the rest by name."""
    known = comparison in MAIN_COMPARISONS
    return (MAIN_COMPARISONS.index(comparison) if known else len(MAIN_COMPARISONS), comparison)


def _traces(name: str, curve: drawing.Curve) -> list[drawing.Json]:
    colour, dash = style_of(name)
    # Hidden until selected in the legend, so that the chain itself stays readable.
    hidden: drawing.Json = (
        {"visible": "legendonly"}
        if name != AT_LAG_ZERO and comparisons.split_comparison(name)[0] == scorers.REFERENCE
        else {}
    )
    # A log axis cannot show 0: the caption counts those steps.
    visible = drawing.Curve(curve.steps, [value if value is not None and value > 0 else None for value in curve.values])
    if len(visible.points()) <= overview.MOST_COLUMNS:
        return [drawing.line(visible, name, colour, line={"dash": dash}, hovertemplate="%{y:.2e}", **hidden)]
    steps, means, low, high = overview.columns_of(visible)
    curve, with_group = drawing.Curve([int(step) for step in steps], means), {"legendgroup": name, **hidden}
    mean = drawing.line(curve, name, colour, line={"dash": dash}, hovertemplate="%{y:.2e}", **with_group)
    return drawing.banded(mean, low, high, showlegend=False, **with_group)


def _bands(edges: Sequence[float]) -> list[drawing.Json]:
    bands = zip(edges, edges[1:], (drawing.HEALTHY_BAND, drawing.WARNING_BAND, drawing.CRITICAL_BAND), strict=False)
    return [
        {
            "type": "rect", "layer": "below", "xref": "paper", "x0": 0, "x1": 1, "yref": "y", "y0": bottom, "y1": top,
            "fillcolor": colour, "line": {"width": 0},
        }
        for bottom, top, colour in bands
    ]  # fmt: skip


def _band_names(tops: Sequence[float]) -> list[drawing.Json]:
    names = zip(
        tops, ("healthy", "warning", "critical"), (drawing.HEALTHY, drawing.WARNING, drawing.CRITICAL), strict=True
    )
    return [
        {
            "xref": "paper", "x": 1, "xanchor": "right", "yref": "y", "y": math.log10(top), "yanchor": "top",
            "text": text, "showarrow": False, "font": {"color": colour, "size": 12},
        }
        for top, text, colour in names
    ]  # fmt: skip


def _caption(curves: Mapping[str, drawing.Curve], model_kind: ModelKind | None) -> str:
    zeros = [
        f"{name} is exactly 0 at {count} of {len(points)} steps, which a log axis cannot show"
        for name, curve in curves.items()
        if (points := curve.points()) and (count := sum(value == 0 for _, value in points))
    ]
    bands = (
        "k3 per token, named target/behaviour. Against rollout, which sampled the tokens, it estimates KL(μ‖π); "
        f"between other scores it is the size of a link, no KL. {ranges_note('k3_kl', model_kind)}"
    )
    is_long = any(len(curve.points()) > overview.MOST_COLUMNS for curve in curves.values())
    lines = ["Lines: the mean of neighbouring steps; bands: their range."] if is_long else []
    if AT_LAG_ZERO in curves:
        lines.append(f"The ranges hold for the line {AT_LAG_ZERO}; {comparisons.TRAINER_ROLLOUT} is of all tokens.")
    return " ".join([bands, *lines, *(f"{zero}." for zero in zeros)])


def _summary(curves: Mapping[str, drawing.Curve]) -> str:
    sentences = []
    for name, curve in curves.items():
        steps, values = zip(*curve.points(), strict=True)
        sentences.append(
            f"{name}: {drawing.scientific(values[-1])} at step {steps[-1]}, between {drawing.scientific(min(values))} "
            f"and {drawing.scientific(max(values))} over {len(values)} steps."
        )
    return " ".join(sentences)


def comparison_figure(
    title: str, unit: str, curves: Sequence[tuple[str, drawing.Curve]], *, logarithmic: bool = False
) -> drawing.Figure | drawing.Missing:
    """Return a line for each run; `curves` in the order of the runs, which gives the colours."""
    shown = [(at, name, curve) for at, (name, curve) in enumerate(curves) if curve]
    if not shown:
        return drawing.Missing(title, "None of these runs logs it.")
    traces = [_line(at, name, curve, logarithmic) for at, name, curve in shown]
    axis: drawing.Json = {"title": {"text": unit}}
    if logarithmic:
        axis |= drawing.log_axis([value for _, _, curve in shown for _, value in curve.points()])
    absent = [name for name, curve in curves if not curve]
    caption = f"Not logged by {', '.join(absent)}." if absent else ""
    newest = [(name, curve.points()[-1]) for _, name, curve in shown]
    summary = " ".join(f"{name}: {drawing.scientific(value)} at step {step}." for name, (step, value) in newest)
    return drawing.Figure(title, caption, summary, traces, {"xaxis": drawing.step_axis(), "yaxis": axis})


def _line(at: int, name: str, curve: drawing.Curve, logarithmic: bool) -> drawing.Json:
    values = [None if value is None or (logarithmic and value <= 0) else value for value in curve.values]
    dash = DASHES[at // len(drawing.SERIES) % len(DASHES)]
    colour = drawing.SERIES[at % len(drawing.SERIES)]
    return drawing.line(drawing.Curve(curve.steps, values), name, colour, line={"dash": dash}, hovertemplate="%{y:.4g}")
