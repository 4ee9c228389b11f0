"""The figures of a run and of a step: their names, order and data."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

from foreshock.comparisons import STEP_ROW, TRAINER_ROLLOUT
from foreshock.measures.statistics import conditions, tails
from foreshock.ranges import HealthyRange, required_range
from foreshock_service.platform.database.tables import Run
from foreshock_service.platform.problem import ProblemError
from foreshock_service.present.pages.figures import Curve, Figure, Missing, buckets, drawing, mismatch, trends
from foreshock_service.present.pages.figures.attribution import ATTRIBUTION_TITLE, TOKENS_TITLE, attribution_figure
from foreshock_service.present.pages.figures.buckets import HEAT_MAP_TITLE
from foreshock_service.present.pages.presenters import advice, alerts, attribution, rollout
from foreshock_service.present.pages.presenters.viewing import (
    ENTROPIES,
    GRADIENT_NORMS,
    REWARDS,
    Viewing,
    curves_of,
    first_of,
    scalar_curves,
)

SIGNALS_TITLE = "Training signals"
TAILS_TITLE = "Tails and effective sample size"


class FigureNotFound(ProblemError):
    """There is no figure of this name."""

    status = 404
    problem_type = "figure-not-found"


RunFigure = Callable[[Viewing, Run], Figure | Missing]
StepFigure = Callable[[Viewing, Run, int, int | None], Figure | Missing]


@dataclass(frozen=True, slots=True)
class RunPlot:
    """A figure of a run's page. If it is `over_steps`, changes of the run are marked in it; `bands`: its alerts too."""

    title: str
    make: RunFigure
    wide: bool = False
    over_steps: bool = False
    bands: bool = True

    def draw(self, viewing: Viewing, run: Run) -> Figure | Missing:
        """Return the figure, with the run's changes."""
        figure = self.make(viewing, run)
        if not self.over_steps or isinstance(figure, Missing):
            return figure
        changed = trends.with_changes(figure, alerts.marks_of(viewing, run.id))
        return trends.with_bands(
            changed, alerts.bands_of(viewing, run) if self.bands else (), alerts.named_marks(viewing, run)
        )


@dataclass(frozen=True, slots=True)
class StepPlot:
    """A figure of a step's page; `make` takes the step and its attempt.

    `choices`: the figures that a reader can select in its place, itself first, with a label each.
    """

    title: str
    make: StepFigure
    wide: bool = False
    choices: Mapping[str, str] = field(default_factory=dict)


def mismatch_of_run(viewing: Viewing, run: Run) -> Figure | Missing:
    """Return k3 of every comparison over steps."""
    found = curves_of(viewing, run.id, ("k3_kl",))
    k3 = {name: of["k3_kl"] for name, of in found.items() if name != STEP_ROW}
    return mismatch.mismatch_figure(k3, run.model_kind)


def lengths_of_run(viewing: Viewing, run: Run) -> Figure | Missing:
    """Return the response lengths over steps, with the surge on which the schedule is based."""
    names = ("response_length_mean", "response_length_p50", "response_length_p90", "response_length_max")
    found = curves_of(viewing, run.id, names, (STEP_ROW,)).get(STEP_ROW, {})
    mean, median, ninetieth, longest = (found.get(name, Curve((), ())) for name in names)
    surge = advice.surge_step(viewing, run.id)
    return trends.length_figure(trends.LengthCurves(mean, median, ninetieth, longest, surge, run.length_cap))


def learning_rate_of_run(viewing: Viewing, run: Run) -> Figure | Missing:
    """Return the advised scale over steps, past and planned."""
    return trends.learning_rate_figure(advice.scale_curve(viewing, run))


def signals_of_run(viewing: Viewing, run: Run) -> Figure | Missing:
    """Return reward, entropy and gradient norm: measured from the rollouts, else as the trainer reports them."""
    measured = curves_of(viewing, run.id, ("reward_mean", "entropy_mean"), (STEP_ROW,)).get(STEP_ROW, {})
    reported = scalar_curves(viewing, run.id, (*GRADIENT_NORMS, *ENTROPIES, *REWARDS))
    panels = (
        drawing.Panel("reward", measured.get("reward_mean") or first_of(reported, REWARDS)),
        drawing.Panel("entropy, nats per token", measured.get("entropy_mean") or first_of(reported, ENTROPIES)),
        drawing.Panel("gradient norm", first_of(reported, GRADIENT_NORMS), logarithmic=True),
    )
    missing = (
        "This run logs no reward, entropy or gradient norm. Client.log_scalars(step, {'grad_norm': …}) sends them."
    )
    caption = "Reward and entropy of the rollouts; gradient norm as the trainer reports it."
    return drawing.panels_figure(SIGNALS_TITLE, caption, panels, why_missing=missing)


def tails_of_run(viewing: Viewing, run: Run) -> Figure | Missing:
    """Return the tail of the ratios of trainer/rollout and the effective sample size that remains."""
    names = (
        "tail_2", "tail_asymmetry_ln2", "pareto_k", "rollout_probs_diff_mean", "low_probability_abs_d", "ess_token",
        "max_d",
    )  # fmt: skip
    found = curves_of(viewing, run.id, names, (TRAINER_ROLLOUT,)).get(TRAINER_ROLLOUT, {})
    tail, asymmetry, shape, difference, low, ess, largest = (found.get(name, Curve((), ())) for name in names)
    kind = run.model_kind
    tail_range, shape_range = required_range("tail_2", kind), required_range("pareto_k", kind)
    difference_range = required_range("rollout_probs_diff_mean", kind)
    # If no ratio reaches e, a heavy shape makes intervals too short, and leaves means of ratios alone.
    matters = any(value >= attribution.PARETO_FAR for _, value in largest.points())
    panels = (
        _judged("F(2): tokens off by more than a factor of 2", tail, tail_range),
        drawing.Panel("tail asymmetry at ln 2 (above 0: π ≪ μ)", asymmetry),
        _judged("k̂, the shape of the tail of π/μ", shape, shape_range if matters else None),
        _judged("mean |Δ probability|", difference, difference_range),
        drawing.Panel(f"mean |d| of tokens with μ < {conditions.LOW_PROBABILITY:g}, nats", low, logarithmic=True),
        drawing.Panel("effective sample size of the token weights", ess),
    )
    means = (
        f"Ratios of this run reach e: if k̂ is above {shape_range.critical}, means of ratios and effective sizes cannot "
        "be trusted."
        if matters
        else "No ratio of this run reaches e, so k̂ concerns intervals only."
    )
    caption = (
        f"{TRAINER_ROLLOUT}. F(2): {tail_range.text}. Mean |Δ probability|: {difference_range.text}. "
        f"k̂ above {tails.LARGEST_TAIL_SHAPE:g}: the range of k3 is too short. {means}"
    )
    missing = f"No step has {TRAINER_ROLLOUT} yet: log trainer_log_probs beside rollout_log_probs."
    return drawing.panels_figure(TAILS_TITLE, caption, panels, why_missing=missing)


def _judged(name: str, curve: Curve, known: HealthyRange | None) -> drawing.Panel:
    """Return a panel with the thresholds of a range; None: without."""
    if known is None:
        return drawing.Panel(name, curve)
    return drawing.Panel(name, curve, warning_above=known.warning, critical_above=known.critical)


def attribution_of_run(viewing: Viewing, run: Run) -> Figure | Missing:
    """Return the attribution of the newest step that was replayed."""
    return attribution_figure(attribution.newest_chain(viewing, run.id))


def attribution_of_step(viewing: Viewing, run: Run, step: int, attempt: int | None) -> Figure | Missing:
    """Return the attribution of a step."""
    return attribution_figure(attribution.chain_of_step(viewing, run.id, step, attempt))


RUN_PLOTS: Mapping[str, RunPlot] = {
    "mismatch": RunPlot(mismatch.MISMATCH_TITLE, mismatch_of_run, wide=True, over_steps=True),
    "signals": RunPlot(SIGNALS_TITLE, signals_of_run, over_steps=True),
    "length": RunPlot(trends.LENGTH_TITLE, lengths_of_run, over_steps=True),
    "learning-rate": RunPlot(trends.LEARNING_RATE_TITLE, learning_rate_of_run, over_steps=True),
    "attribution": RunPlot(ATTRIBUTION_TITLE, attribution_of_run),
    "buckets": RunPlot(buckets.TITLE, rollout.buckets_of_run),
    "heat-map": RunPlot(HEAT_MAP_TITLE, rollout.heat_map_of_run, over_steps=True, bands=False),
    "tails": RunPlot(TAILS_TITLE, tails_of_run, over_steps=True),
}
STEP_PLOTS: Mapping[str, StepPlot] = {
    "attribution": StepPlot(ATTRIBUTION_TITLE, attribution_of_step),
    "buckets": StepPlot(
        buckets.TITLE,
        partial(rollout.buckets_of_step, "probability"),
        choices={
            "buckets": buckets.BY["probability"].choice,
            **{f"buckets-{name}": by.choice for name, by in buckets.BY.items() if name != "probability"},
            "buckets-token-id": "token id",
        },
    ),
    "tokens": StepPlot(TOKENS_TITLE, rollout.tokens_of_step, wide=True),
}
# Figures that replace another one when a reader selects them.
CHOSEN_STEP_PLOTS: Mapping[str, StepPlot] = {
    **{
        f"buckets-{name}": StepPlot(by.title, partial(rollout.buckets_of_step, name))
        for name, by in buckets.BY.items()
        if name != "probability"
    },
    "buckets-token-id": StepPlot(buckets.TOKEN_ID_TITLE, rollout.token_ids_of_step),
}


def run_plot(name: str) -> RunPlot:
    """Return the plot of this name. Raises FigureNotFound."""
    if name not in RUN_PLOTS:
        raise FigureNotFound(f"unknown figure {name!r}; figures: {', '.join(RUN_PLOTS)}")
    return RUN_PLOTS[name]


def step_plot(name: str) -> StepPlot:
    """Return the plot of this name. Raises FigureNotFound."""
    known = {**STEP_PLOTS, **CHOSEN_STEP_PLOTS}
    if name not in known:
        raise FigureNotFound(f"unknown figure {name!r}; figures: {', '.join(known)}")
    return known[name]
