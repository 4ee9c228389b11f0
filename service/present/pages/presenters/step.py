"""The page of a step, the list of steps, what the lint found."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from foreshock import page_addresses, ranges
from foreshock.api.runs import StepRecord
from foreshock.api.steps import CheckRecord, LintExampleRecord, LintRecord, LintWarningRecord, RunWarningRecord
from foreshock.comparisons import STEP_ROW, TRAINER_ROLLOUT
from foreshock.lint import CHECKS
from foreshock.measures import registry, rollout_summaries
from foreshock_service.platform import columnar, problem
from foreshock_service.present.pages import step_models, view_models
from foreshock_service.present.pages.figures.mismatch import known_first, shown_comparisons
from foreshock_service.present.pages.presenters import alerts, figures, rollout
from foreshock_service.present.pages.presenters import attribution as links
from foreshock_service.present.pages.presenters.doctor import doctor_of_step
from foreshock_service.present.pages.presenters.viewing import Viewing
from foreshock_service.present.pages.rendering import OUT_OF_DATE, count, number
from foreshock_service.runs import events, lint, measurements, runs, steps
from foreshock_service.runs.curves import CurveQuery, Curves, read_curves
from foreshock_service.runs.tokens import TokenQuery, find_tokens

_NOT_CHECKED = "Semantics: not checked."


def lint_of_step(viewing: Viewing, run_id: str, step: int, attempt: int) -> view_models.LintPanel:
    """Return the lint of a step."""
    try:
        found = lint.read_step(viewing.session, viewing.principal, run_id, step, attempt)
    except lint.LintNotFound:
        return view_models.LintPanel((), (), len(CHECKS), _NOT_CHECKED)
    return view_models.LintPanel(
        cards=[_card(warning) for warning in found.warnings],
        not_checked=[_words(check) for check in found.checks if check.state == "not checked"],
        checks=len(found.checks),
        note=_sample_note(found),
    )


def _sample_note(found: LintRecord) -> str | None:
    """Return over how many rollouts the checks were made, if not over all."""
    if found.coverage is None or found.coverage.rests_on == "all tokens":
        return None
    return f"Semantics: checked on {found.coverage.text}."


def lint_of_run(viewing: Viewing, run_id: str, last_step: int | None, run_address: str) -> view_models.LintPanel:
    """Return the lint of a run's steps; the checks that could not be made are on the steps' pages."""
    found = lint.read_run(viewing.session, viewing.principal, run_id, None)
    cards = [_card_of_steps(run_address, warning, found.checked_steps) for warning in found.warnings]
    cards[:0] = [_card(warning) for warning in found.window]
    if found.whole_run is not None:
        cards.insert(0, _card(found.whole_run))
    unchecked = last_step is not None and not found.checked_steps
    return view_models.LintPanel(cards, (), len(CHECKS), _NOT_CHECKED if unchecked else None)


def _card(warning: LintWarningRecord) -> view_models.LintCard:
    return view_models.LintCard(
        name=warning.name.replace("_", " "),
        severity=warning.severity,
        title=warning.title,
        seen=warning.seen,
        where=[_place(example) for example in warning.where],
        effect=warning.effect,
        remedy=warning.remedy,
    )


def _card_of_steps(run_address: str, warning: RunWarningRecord, checked: int) -> view_models.LintCard:
    check = CHECKS.get(warning.name)
    since = f", since step {warning.first_step}" if warning.steps > 1 else ""
    return view_models.LintCard(
        name=warning.name.replace("_", " "),
        severity=warning.severity,
        title=warning.title,
        seen="",
        where=(),
        effect=check.effect if check is not None else "",
        remedy=check.remedy if check is not None else "",
        steps=f"at {count(warning.steps)} of {count(checked)} steps{since}",
        newest=warning.newest_step,
        newest_address=f"{run_address}/steps/{warning.newest_step}",
    )


def _place(example: LintExampleRecord) -> str:
    place = example.sample_id if example.token is None else f"{example.sample_id}, token {example.token}"
    return f"{place}: {example.text}" if example.text else place


def _words(check: CheckRecord) -> str:
    return f"{check.name.replace('_', ' ')}: {check.why}"


# The step before is searched this many steps back.
FURTHEST_BACK = 500


class StepNotFound(problem.ProblemError):
    """The run has no rollouts of this step."""

    status = 404
    problem_type = "step-not-found"


@dataclass(frozen=True, slots=True)
class Neighbourhood:
    """An active step, and the steps before and after it."""

    step: StepRecord
    earlier: int | None
    later: int | None


def neighbourhood(viewing: Viewing, run_id: str, step: int) -> Neighbourhood:
    """Return the step and its neighbours. Raises StepNotFound."""
    after = _steps_after(viewing, run_id, step - 1, 2)
    if not after or after[0].step != step:
        raise StepNotFound(f"the run has no rollouts of step {step}")
    before = [each.step for each in _steps_after(viewing, run_id, step - FURTHEST_BACK, FURTHEST_BACK)]
    earlier = [number for number in before if number < step]
    return Neighbourhood(after[0], earlier[-1] if earlier else None, after[1].step if len(after) > 1 else None)


def _steps_after(viewing: Viewing, run_id: str, step: int, limit: int) -> list[StepRecord]:
    return steps.steps_after(viewing.session, run_id, None, step, limit)


JUDGED = ("k3_kl", "max_abs_d", "tail(2)", "ess_token", "rollout_probs_diff_mean")
"""The measures that a step is judged by, of its first comparison."""
IN_THE_HEADER = frozenset({"num_rollouts", "num_tokens"})
WORST_TOKENS = 20
WORST_ROLLOUTS = 8


def step_page(viewing: Viewing, run_id: str, number_of_step: int) -> step_models.StepPage:
    """Return the page of an active step. Raises RunNotFound, RunDeleted, StepNotFound."""
    run = runs.get_run(viewing.session, viewing.principal, run_id)
    around = neighbourhood(viewing, run_id, number_of_step)
    step = around.step
    query = CurveQuery(from_step=step.step, to_step=step.step)
    curves = read_curves(viewing.session, viewing.context, viewing.principal, run_id, query)
    values = _values(curves)
    comparisons = shown_comparisons(sorted((name for name in values if name != STEP_ROW), key=known_first))
    attribution = links.attribution_of(viewing, run_id, step.step, None)
    key = events.StepKey(run_id, step.attempt, step.step)
    address = page_addresses.run_page_path(run.project, run.key)
    parts = f"/pages/runs/{run_id}/steps/{step.step}"
    measures = links.measure_groups(values, comparisons, run.model_kind)
    return step_models.StepPage(
        run_name=run.name or run.key,
        run_address=address,
        project=run.project,
        step=step,
        state=_state(step),
        live=run.state == "running",
        earlier=around.earlier,
        later=around.later,
        judged=[row for row in measures[0].rows if row.name in JUDGED] if comparisons else [],
        out_of_date=OUT_OF_DATE if measurements.is_out_of_date(viewing.session, key) else None,
        lint=lint_of_step(viewing, run_id, step.step, step.attempt),
        comparisons=comparisons,
        sampled=[name for name, table in curves.by_comparison().items() if table.array("from_sample")[0]],
        measures=measures,
        ranges_note=ranges.ranges_note("k3_kl", run.model_kind),
        intervals_note=links.INTERVALS_NOTE,
        tails_note=f"k̂ above {ranges.required_range('pareto_k', run.model_kind).critical} and ratios that reach e: "
        "means of ratios and effective sample sizes cannot be trusted.",
        step_measures=_of_rollouts(values.get(STEP_ROW, {})),
        figures=[_plot(parts, name, plot) for name, plot in figures.STEP_PLOTS.items()],
        links=links.link_rows(attribution),
        conclusions=links.sentences_of(attribution),
        links_notes=links.notes_of(attribution),
        doctor=doctor_of_step(viewing, key),
        tokens_address=f"{parts}/tokens",
        rollouts_address=f"/v1/runs/{run_id}/steps/{step.step}/rollouts?attempt={step.attempt}",
        corrections_address=f"{parts}/corrections",
        grafana_address=alerts.run_dashboard(viewing.context.settings, run.id),
    )


def worst_tokens(viewing: Viewing, run_id: str, step: int) -> step_models.TokensPart:
    """Return the tokens of trainer/rollout that differ most, with every scorer's log-prob; reads the step's shards."""
    run = runs.get_run(viewing.session, viewing.principal, run_id)
    address = page_addresses.run_page_path(run.project, run.key)
    query = TokenQuery(run_id, step, None, TRAINER_ROLLOUT, WORST_TOKENS, None)
    try:
        found = find_tokens(viewing.context, viewing.principal, query)
    except measurements.MeasurementNotFound as error:
        return step_models.TokensPart(TRAINER_ROLLOUT, (), (), f"{error.detail}.")
    table = found.table
    floats = [columnar.floats_or_none(values) for values in (table.array("d"), *map(found.log_probs, found.scorers))]
    texts = rollout.token_texts(viewing, run, found.attempt, table.array("token_id").tolist())
    rows = [
        step_models.TokenRow(
            sample_id,
            f"{rollout.rollout_address(address, step, sample_id)}#token-{position}",
            position,
            token_id,
            None if texts is None else texts[token_id],
            number(d),
            [number(each) for each in log_probs],
        )
        for sample_id, position, token_id, d, *log_probs in zip(
            table.strings("sample_id"),
            table.array("position").tolist(),
            table.array("token_id").tolist(),
            *floats,
            strict=True,
        )
    ]
    within = "" if found.coverage.rests_on == "all tokens" else f"Among {found.coverage.text} in full."
    missing = "The step has no token with two finite log-probs."
    rollouts = _worst_rollouts(viewing, events.StepKey(run_id, found.attempt, step), address)
    return step_models.TokensPart(TRAINER_ROLLOUT, found.scorers, rows, missing, within, rollouts)


def _worst_rollouts(viewing: Viewing, key: events.StepKey, run_address: str) -> list[step_models.WorstRolloutRow]:
    """Return the rollouts whose largest |d| is largest."""
    packed = measurements.summaries_of_steps(viewing.session, [key], TRAINER_ROLLOUT).get(key)
    if packed is None:
        return []
    summaries = rollout_summaries.RolloutSummaries.from_bytes(packed)
    largest = np.nan_to_num(summaries.largest_abs_d(), nan=-1.0)
    names = summaries.table.column("sample_id")
    k3, tokens, lengths, rewards = (summaries.column(name) for name in ("sum_k3", "n_tokens", "length", "reward"))
    order = np.argsort(-largest, kind="stable")[:WORST_ROLLOUTS].tolist()
    return [
        step_models.WorstRolloutRow(
            names[row].as_py(),
            rollout.rollout_address(run_address, key.step, names[row].as_py()),
            number(float(largest[row])),
            number(float(k3[row] / tokens[row])),
            count(int(lengths[row])),
            number(float(rewards[row])),
        )
        for row in order
        if largest[row] >= 0.0
    ]


def _plot(parts: str, name: str, plot: figures.StepPlot) -> view_models.Plot:
    choices = [view_models.Choice(text, f"{parts}/figures/{each}.json") for each, text in plot.choices.items()]
    return view_models.Plot(name, plot.title, f"{parts}/figures/{name}.json", plot.wide, choices)


def _values(curves: Curves) -> dict[str, dict[str, float | None]]:
    return {
        comparison: {measure: columnar.floats_or_none(table.array(measure))[0] for measure in curves.measures}
        for comparison, table in curves.by_comparison().items()
    }


def _of_rollouts(values: Mapping[str, float | None]) -> list[step_models.StepMeasure]:
    shown = []
    for measure in registry.STEP_MEASURES:
        if measure.name in IN_THE_HEADER:
            continue
        value = values.get(measure.column)
        if value is not None:
            shown.append(
                step_models.StepMeasure(
                    measure.name.replace("_", " "), links.measure_value(measure.column, value, None).text
                )
            )
    return shown


def _state(step: StepRecord) -> view_models.Label:
    if step.closed:
        if step.shards >= step.expected_shards:
            return view_models.Label("closed", "good")
        return view_models.Label(f"closed with {steps.shards_in_words(step.shards, step.expected_shards)}", "warning")
    return view_models.Label("waiting for shards", live=True)
