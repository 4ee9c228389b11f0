"""The figures of a run and of a step: their names, order and data."""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, TypeVar

from fastapi import Query
from pydantic import StringConstraints

from foreshock.comparisons import STEP_ROW, TRAINER_ROLLOUT
from foreshock.diagnosis import lag_zero, mismatch_rules, quantities
from foreshock.diagnosis.lags import LAG_KEY
from foreshock.healthy_ranges import HealthyRange, required_range
from foreshock.measures.registry import TOKENS_BY_LAG
from foreshock.measures.statistics import conditions, tails
from foreshock_service.platform import parameters, problem
from foreshock_service.platform.database.tables import Run
from foreshock_service.present.pages.figures import Curve, Figure, Missing, buckets, drawing, mismatch, overview
from foreshock_service.present.pages.figures.attribution import ATTRIBUTION_TITLE, TOKENS_TITLE
from foreshock_service.present.pages.presenters import advice, alerts, attribution, rollout
from foreshock_service.present.pages.presenters.viewing import (
    NOTHING,
    Viewing,
    curves_of,
    quantity_curves,
    scalar_curves,
)
from foreshock_service.runs.runs import get_run

OVERVIEW_TITLE = "The run, step by step"
_OVERVIEW: Mapping[str, str] = {
    "Reward": quantities.REWARD_KEY,
    "Mismatch, k3": mismatch_rules.K3,
    "Response length": quantities.LENGTH_KEY,
    "Entropy": quantities.ENTROPY_KEY,
    "Gradient norm": quantities.GRADIENT_NORM_KEY,
    "Learning rate": quantities.LEARNING_RATE_KEY,
}
LENGTH_TITLE = "Response length"
TAILS_TITLE = "Tails and effective sample size"
ADVISED = "Learning rate ×"
"""The panel of the advised scale, which has a value from step 0 on, whatever was logged."""


class FigureNotFound(problem.ProblemError, status=404, problem_type="figure-not-found"):
    """There is no figure of this name."""


Scalars = Annotated[
    Sequence[Annotated[str, StringConstraints(max_length=200, pattern=parameters.NO_NUL)]], Query(max_length=24)
]


@dataclass(frozen=True, slots=True)
class Asked:
    """The request for a figure of a run: a range of steps, and the names of scalars."""

    from_step: parameters.FromStep = 0
    to_step: parameters.ToStep = parameters.LARGEST_STEP
    scalar: Scalars = ()

    def part(self, curve: Curve) -> Curve:
        start = bisect_left(curve.steps, self.from_step)
        end = bisect_right(curve.steps, self.to_step)
        return Curve(curve.steps[start:end], curve.values[start:end])


Plot = TypeVar("Plot")
RunFigure = Callable[[Viewing, Run, Asked], Figure | Missing]
StepFigure = Callable[[Viewing, Run, int], Figure | Missing]


@dataclass(frozen=True, slots=True)
class Place:
    """A place for a figure, which the browser fetches from `address`, or from that of a choice: (text, address)."""

    id: str
    title: str
    address: str
    wide: bool = False
    choices: Sequence[tuple[str, str]] = ()
    over_steps: bool = False


@dataclass(frozen=True, slots=True)
class RunPlot:
    """A figure of a run's page. If it is `marked`, alerts and changes are added to what `make` draws."""

    title: str
    make: RunFigure
    over_steps: bool = True
    marked: bool = False


StepPlot = tuple[str, StepFigure]
"""The title of a figure of a step's page, and the function that makes it."""


def mismatch_of_run(viewing: Viewing, run: Run, _: Asked) -> Figure | Missing:
    found = curves_of(viewing, run.id, ("k3_kl",))
    k3 = {name: of["k3_kl"] for name, of in found.items() if name != STEP_ROW}
    return mismatch.mismatch_figure(k3, run.model_kind, _at_lag_zero(viewing, run, ("k3_kl",)).get("k3_kl"))


def _at_lag_zero(viewing: Viewing, run: Run, measures: Sequence[str]) -> dict[str, Curve]:
    """Return, for each step, the values of trainer/rollout that ranges judge; empty if every token is at lag 0."""
    columns = sorted({*measures, *lag_zero.LAG_ZERO_COLUMNS, "lag_mean"})
    found = curves_of(viewing, run.id, columns, (TRAINER_ROLLOUT, STEP_ROW))
    of_tokens = found.get(TRAINER_ROLLOUT, {})
    if not any(any(of_tokens[each.column].values) for each in TOKENS_BY_LAG[1:] if each.column in of_tokens):
        return {}
    rollouts = found.get(STEP_ROW, {}).get("lag_mean", NOTHING)
    lags = dict(zip(rollouts.steps, rollouts.values, strict=True))
    steps = next(iter(of_tokens.values())).steps
    of_steps = [
        {f"{TRAINER_ROLLOUT}:{name}": curve.values[place] for name, curve in of_tokens.items()}
        | {LAG_KEY: lags.get(step)}
        for place, step in enumerate(steps)
    ]
    return {each: Curve(steps, [lag_zero.at_lag_zero(each, values) for values in of_steps]) for each in measures}


def lengths_of_run(viewing: Viewing, run: Run, asked: Asked) -> Figure | Missing:
    """Return the response lengths over steps, and the surge that starts the schedule."""
    names = {"Mean": "mean", "Median": "p50", "90th percentile": "p90", "Longest": "max"}
    columns = [f"response_length_{each}" for each in names.values()]
    found = curves_of(viewing, run.id, columns, (STEP_ROW,)).get(STEP_ROW, {})
    cap = {} if run.length_cap is None else {"cap": (float(run.length_cap), drawing.MUTED)}
    panels = [
        overview.Panel(name, asked.part(found.get(column, NOTHING)), lines=cap)
        for name, column in zip(names, columns, strict=True)
    ]
    marks = alerts.marks_of(viewing, run.id)
    said = "No surge so far: the mean has not crossed twice its smoothed baseline in steep growth."
    schedule = advice.advice_of(viewing, run.id).schedule
    if schedule is not None:
        said = (
            "The surge, the first confirmed crossing of twice the smoothed baseline, was at step "
            f"{schedule.surge_step}."
        )
        marks.append(overview.Mark(schedule.surge_step, "the surge"))
    legend = overview.legend_of(marks)
    caption = f"Model-generated tokens per rollout, before any filtering. Dashed: the length cap. {said} {legend}"
    missing = "No rollouts have been uploaded for a closed step yet."
    return overview.overview_figure(LENGTH_TITLE, caption, panels, marks, why_missing=missing)


def overview_panels(viewing: Viewing, run: Run, asked: Asked) -> list[overview.Panel]:
    """Return reward, mismatch, length, entropy, gradient norm and learning rate: measured, else as logged."""
    curves = quantity_curves(viewing, run, tuple(_OVERVIEW.values()))
    panels = []
    for title, key in _OVERVIEW.items():
        is_k3 = key == mismatch_rules.K3
        lines = _lines_of_k3(viewing, run) if is_k3 else {}
        fresh = _at_lag_zero(viewing, run, ("k3_kl",)).get("k3_kl") if is_k3 else None
        if fresh is not None:
            # Thresholds hold at lag 0 only.
            if fresh:
                panels.append(overview.Panel(f"{title} at lag 0", asked.part(fresh), logarithmic=True, lines=lines))
            title, lines = f"{title} of all tokens", {}
        panels.append(
            overview.Panel(
                title, asked.part(curves[key]), logarithmic=is_k3 or key == quantities.GRADIENT_NORM_KEY, lines=lines
            )
        )
    if not panels[-1].curve:
        panels[-1] = overview.Panel(ADVISED, asked.part(_advised(viewing, run)))
    return panels


def overview_of_run(viewing: Viewing, run: Run, asked: Asked) -> Figure | Missing:
    panels, marks = overview_panels(viewing, run, asked), alerts.marks_of(viewing, run.id)
    known = required_range("k3_kl", run.model_kind)
    caption = (
        f"Over training steps. k3: nats per token, {TRAINER_ROLLOUT}; {known.healthy} is healthy at lag 0, dashed: the "
        f"thresholds and the run's own baseline. Length: tokens per response. Entropy: nats per token. Of a long run "
        f"each place shows the mean and the range of neighbouring steps. {overview.legend_of(marks)}"
    )
    missing = "No step is closed yet, and no scalar is one of reward, length, entropy, gradient norm and learning rate."
    return overview.overview_figure(OVERVIEW_TITLE, caption, panels, marks, why_missing=missing)


def _advised(viewing: Viewing, run: Run) -> Curve:
    """Return the advised scale at every step so far; nothing before the first closed step."""
    found = advice.scale_curve(viewing, run)
    if found is None:
        return NOTHING
    starts = [step for step, _ in found.stairs]
    steps = range(found.now + 1)
    return Curve(steps, [found.stairs[bisect_right(starts, step) - 1][1] for step in steps])


def _lines_of_k3(viewing: Viewing, run: Run) -> dict[str, tuple[float, str]]:
    """Return the thresholds of k3, and the run's own baseline from its first alert of k3: that before the onset."""
    lines = _thresholds(required_range("k3_kl", run.model_kind))
    standing = [each for each in alerts.standing_alerts(viewing, run.id) if "baseline" in each.evidence]
    of_k3 = [each for each in standing if each.evidence.get("key") == mismatch_rules.K3]
    if of_k3:
        lines["baseline"] = (min(of_k3, key=lambda each: each.onset).evidence["baseline"], drawing.HEALTHY)
    return lines


def scalars_of_run(viewing: Viewing, run: Run, asked: Asked) -> Figure | Missing:
    curves = scalar_curves(viewing, run.id, asked.scalar) if asked.scalar else {}
    marks = alerts.marks_of(viewing, run.id)
    panels = [overview.Panel(name, asked.part(curves.get(name, NOTHING))) for name in asked.scalar]
    return overview.overview_figure(
        "Logged scalars", overview.legend_of(marks), panels, marks, why_missing="These scalars have no finite value."
    )


def tails_of_run(viewing: Viewing, run: Run, asked: Asked) -> Figure | Missing:
    """Return the tail of the ratios of trainer/rollout and the effective sample size that remains."""
    names = (
        "tail_2", "tail_asymmetry_ln2", "pareto_k", "mean_abs_d", "low_probability_abs_d", "ess_token",
        "max_d",
    )  # fmt: skip
    found = curves_of(viewing, run.id, names, (TRAINER_ROLLOUT,)).get(TRAINER_ROLLOUT, {})
    tail, asymmetry, shape, difference, low, ess, largest = (asked.part(found.get(name, NOTHING)) for name in names)
    fresh, kind = _at_lag_zero(viewing, run, ("tail_2", "mean_abs_d")), run.model_kind
    tail_range, shape_range = required_range("tail_2", kind), required_range("pareto_k", kind)
    difference_range = required_range("mean_abs_d", kind)
    # If no ratio reaches e, a heavy tail makes intervals too short but does not affect means of ratios.
    matters = any(value >= attribution.PARETO_FAR for _, value in largest.points())
    panels = (
        _judged("F(2): off by more than a factor of 2", tail, None if fresh else tail_range),
        overview.Panel("tail asymmetry at ln 2", asymmetry),
        _judged("k̂, shape of the tail of π/μ", shape, shape_range if matters else None),
        _judged("mean |d|, nats", difference, None if fresh else difference_range),
        overview.Panel(f"mean |d| where μ < {conditions.LOW_PROBABILITY:g}, nats", low, logarithmic=True),
        overview.Panel("effective sample size of tokens", ess),
    )
    means = (
        f"Ratios of this run reach e: if k̂ is above {shape_range.critical}, means of ratios and effective sizes cannot "
        "be trusted."
        if matters
        else "No ratio of this run reaches e, so k̂ concerns intervals only."
    )
    caption = (
        f"{TRAINER_ROLLOUT}. F(2) at lag 0: {tail_range.text}. Asymmetry above 0: π ≪ μ. "
        f"Mean |d| at lag 0: {difference_range.text}. "
        f"k̂ above {tails.LARGEST_TAIL_SHAPE:g}: the range of k3 is too short. {means}"
    )
    missing = f"No step has {TRAINER_ROLLOUT} yet: log trainer_log_probs beside rollout_log_probs."
    marks = alerts.marks_of(viewing, run.id)
    return overview.overview_figure(
        TAILS_TITLE, f"{caption} {overview.legend_of(marks)}", panels, marks, why_missing=missing
    )


def _judged(name: str, curve: Curve, known: HealthyRange | None) -> overview.Panel:
    return overview.Panel(name, curve, lines={} if known is None else _thresholds(known))


def _thresholds(known: HealthyRange) -> dict[str, tuple[float, str]]:
    levels = {"warning": (known.warning, drawing.WARNING), "critical": (known.critical, drawing.CRITICAL)}
    return {name: (level, colour) for name, (level, colour) in levels.items() if level is not None}


RUN_PLOTS: Mapping[str, RunPlot] = {
    "overview": RunPlot(OVERVIEW_TITLE, overview_of_run),
    "mismatch": RunPlot(mismatch.MISMATCH_TITLE, mismatch_of_run, marked=True),
    "length": RunPlot(LENGTH_TITLE, lengths_of_run),
    "learning-rate": RunPlot(
        overview.LEARNING_RATE_TITLE,
        lambda viewing, run, _: overview.learning_rate_figure(advice.scale_curve(viewing, run)),
        marked=True,
    ),
    "attribution": RunPlot(
        ATTRIBUTION_TITLE,
        lambda viewing, run, _: attribution.figure_of(attribution.newest_attribution(viewing, run.id)),
        over_steps=False,
    ),
    "buckets": RunPlot(buckets.TITLE, lambda viewing, run, _: rollout.buckets_of_run(viewing, run), over_steps=False),
    "tails": RunPlot(TAILS_TITLE, tails_of_run),
}
_BY = "Mismatch by "
BUCKET_PLOTS: Mapping[str, StepPlot] = {
    **{
        "buckets" if name == "probability" else f"buckets-{name}": (by.title, partial(rollout.buckets_of_step, name))
        for name, by in buckets.BY.items()
    },
    "buckets-token-id": (buckets.TOKEN_ID_TITLE, rollout.token_ids_of_step),
}
"""Figures that a reader can select in place of each other; the first is shown."""
STEP_PLOTS: Mapping[str, StepPlot] = {
    "attribution": (
        ATTRIBUTION_TITLE,
        lambda viewing, run, step: attribution.figure_of(attribution.attribution_of(viewing, run.id, step)),
    ),
    "buckets": BUCKET_PLOTS["buckets"],
    "tokens": (TOKENS_TITLE, rollout.tokens_of_step),
}


def places_of_step(run_id: str, step: int) -> list[Place]:
    """Return the places of the figures of a step's page."""
    folder = f"/pages/runs/{run_id}/steps/{step}/figures"
    choices = [(title.removeprefix(_BY), f"{folder}/{name}.json") for name, (title, _) in BUCKET_PLOTS.items()]
    return [
        Place(name, title, f"{folder}/{name}.json", choices=choices if name in BUCKET_PLOTS else ())
        for name, (title, _) in STEP_PLOTS.items()
    ]


def run_figure(viewing: Viewing, run_id: str, name: str, asked: Asked) -> Figure | Missing:
    """Return a figure of a run; a `marked` one shows alerts and changes. Raises FigureNotFound, RunNotFound."""
    plot = _named(name, {**RUN_PLOTS, "scalars": RunPlot("Logged scalars", scalars_of_run)})
    run = get_run(viewing.session, viewing.principal, run_id)
    figure = plot.make(viewing, run, asked)
    if not plot.marked or isinstance(figure, Missing):
        return figure
    return overview.marked(figure, alerts.marks_of(viewing, run.id), alerts.named_marks(viewing, run))


def step_figure(viewing: Viewing, run_id: str, step: int, name: str) -> Figure | Missing:
    _, make = _named(name, {**STEP_PLOTS, **BUCKET_PLOTS})
    return make(viewing, get_run(viewing.session, viewing.principal, run_id), step)


def _named(name: str, known: Mapping[str, Plot]) -> Plot:
    if name not in known:
        raise FigureNotFound(f"unknown figure {name!r}; figures: {', '.join(known)}")
    return known[name]
