"""The page of a step, and what the lint and the doctor found at a step or in a run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from foreshock import page_addresses, probe_kinds, ranges
from foreshock.api.attribution import AttributionRecord
from foreshock.api.doctor import DoctorStepRecord
from foreshock.api.probes import ProbeRecord
from foreshock.api.runs import StepRecord
from foreshock.api.steps import CheckRecord, LintWarningRecord, RunWarningRecord
from foreshock.comparisons import STEP_ROW, TRAINER_ROLLOUT
from foreshock.diagnosis.wording import as_sentence, plural
from foreshock.doctor.findings import tried_in_words
from foreshock.lint import CHECKS
from foreshock.measures import registry, rollout_summaries
from foreshock_service.platform import columnar, keys, problem
from foreshock_service.present.pages import rendering, view_models
from foreshock_service.present.pages.figures.mismatch import known_first, shown_comparisons
from foreshock_service.present.pages.presenters import alerts, figures, rollout
from foreshock_service.present.pages.presenters import attribution as links
from foreshock_service.present.pages.presenters.viewing import Viewing
from foreshock_service.replay.probes.service import find_checkpoint, list_probes
from foreshock_service.replay.results import doctor
from foreshock_service.runs import events, lint, measurements, runs, steps
from foreshock_service.runs.curves import CurveQuery, read_curves
from foreshock_service.runs.tokens import TokenQuery, find_tokens

_NOT_CHECKED = "Semantics: not checked."


@dataclass(frozen=True, slots=True)
class LintPanel:
    """The result of the semantics lint; empty if every check was made and passed. `of_steps`: it is of a whole run."""

    checks: int
    warnings: Sequence[LintWarningRecord] = ()
    not_checked: Sequence[CheckRecord] = ()
    note: str | None = None
    of_steps: Sequence[RunWarningRecord] = ()
    checked_steps: int = 0
    run_address: str = ""


def lint_of_step(viewing: Viewing, run_id: str, step: int, attempt: int) -> LintPanel:
    """Return the lint of a step."""
    try:
        found = lint.read_step(viewing.session, viewing.principal, run_id, step, attempt)
    except lint.LintNotFound:
        return LintPanel(len(CHECKS), note=_NOT_CHECKED)
    not_checked = [check for check in found.checks if check.state == "not checked"]
    note = None
    if found.coverage is not None and found.coverage.rests_on != "all tokens":
        note = f"Semantics: checked on {found.coverage.text}."
    return LintPanel(len(found.checks), found.warnings, not_checked, note)


def lint_of_run(viewing: Viewing, run_id: str, last_step: int | None, run_address: str) -> LintPanel:
    """Return the lint of a run's steps; the steps' own pages show the checks that could not be made."""
    found = lint.read_run(viewing.session, viewing.principal, run_id, None)
    whole = () if found.whole_run is None else (found.whole_run,)
    return LintPanel(
        len(CHECKS),
        (*whole, *found.window),
        note=_NOT_CHECKED if last_step is not None and not found.checked_steps else None,
        of_steps=found.warnings,
        checked_steps=found.checked_steps,
        run_address=run_address,
    )


_MOST_PROBES = 50
_MOST_NOT_TRIED = 5


def doctor_of_step(viewing: Viewing, key: events.StepKey) -> dict[str, Any]:
    """Return the newest report on a step, the state of an unfinished examination, and whether one is possible."""
    probes = list_probes(viewing.session, viewing.principal, key.run_id, key.step, None, _MOST_PROBES).items
    asked = next(
        (each for each in probes if each.kind == probe_kinds.DOCTOR.name and each.attempt == key.attempt), None
    )
    found = doctor.KIND.newest(viewing.session, key, 1)
    can_ask = find_checkpoint(viewing.session, *key) is not None and (asked is None or asked.state != "running")
    may_ask = can_ask and viewing.principal.may(keys.Scope.INGEST)
    action = f"/runs/{key.run_id}/steps/{key.step}/doctor" if may_ask else None
    record = doctor.report_record(viewing.session, *found[0]) if found else None
    return _panel(record, key.step, _examination_in_words(asked), action, is_possible=can_ask or asked is not None)


def doctor_of_run(viewing: Viewing, run_id: str) -> dict[str, Any] | None:
    """Return the newest report on any step of a run; None without one."""
    found = doctor.newest_of_run(viewing.session, run_id)
    return _panel(found[0], found[0].step, "", None) if found else None


def _panel(
    record: DoctorStepRecord | None, step: int, state: str, action: str | None, *, is_possible: bool = True
) -> dict[str, Any]:
    """Return a report as a page shows it: found, tried and not named, not tried, and what would come next.

    `state`: that of an unfinished examination. `action`: the address of the form that requests one; None: not allowed
    or one is running. `is_possible`: the step has weights.
    """
    panel = {"step": step, "findings": (), "notes": (), "state": state, "action": action, "is_possible": is_possible}
    if record is None:
        return panel
    report = record.report
    notes = [f"Checksums: {each}" for each in record.checksums]
    notes += [as_sentence(tried_in_words(report))] if report.ruled_out else []
    notes += [f"Not tried: {each.variant}: {each.why}." for each in report.not_tried[:_MOST_NOT_TRIED]]
    more = len(report.not_tried) - _MOST_NOT_TRIED
    notes += [f"{plural(more, 'more variant')} could not be tried."] if more > 0 else []
    notes.append(f"Price: {plural(report.replays, 'replay')}, {report.seconds:.1f} s; {report.ended}.")
    return panel | {"findings": report.findings, "notes": notes}


def _examination_in_words(asked: ProbeRecord | None) -> str:
    """Return the progress of an examination; empty if it is done or was not requested."""
    if asked is None or asked.state == "done":
        return ""
    doing = asked.reason or next((job.doing for job in asked.jobs if job.state == "running" and job.doing), "")
    return f"The examination is {asked.state}{f': {doing}' if doing else ''}."


# The previous step is searched at most this many steps back.
FURTHEST_BACK = 500


class StepNotFound(problem.ProblemError, status=404, problem_type="step-not-found"):
    """The run has no rollouts of this step."""


IN_THE_HEADER = frozenset({"num_rollouts", "num_tokens"})
WORST_TOKENS = 20
WORST_ROLLOUTS = 8


def step_page(viewing: Viewing, run_id: str, number: int) -> dict[str, Any]:
    """Return the page of an active step. Raises RunNotFound, RunDeleted, StepNotFound.

    `step_measures`: name and value of each measure of its rollouts.
    """
    run = runs.get_run(viewing.session, viewing.principal, run_id)
    found_steps = steps.steps_after(viewing.session, run_id, None, number - 1, 2)
    if not found_steps or found_steps[0].step != number:
        raise StepNotFound(f"the run has no rollouts of step {number}")
    step, *later = found_steps
    before = steps.steps_after(viewing.session, run_id, None, number - FURTHEST_BACK, FURTHEST_BACK)
    earlier = [each.step for each in before if each.step < number]
    query = CurveQuery(from_step=number, to_step=number)
    curves = read_curves(viewing.session, viewing.context, viewing.principal, run_id, query)
    values = {
        comparison: {measure: columnar.floats_or_none(table.array(measure))[0] for measure in curves.measures}
        for comparison, table in curves.by_comparison().items()
    }
    comparisons = shown_comparisons(sorted((name for name in values if name != STEP_ROW), key=known_first))
    found = links.attribution_of(viewing, run_id, number, None)
    attribution = found if isinstance(found, AttributionRecord) else None
    key = events.StepKey(run_id, step.attempt, number)
    measures = links.measure_groups(values, comparisons, run.model_kind)
    return {
        "run": run,
        "step": step,
        "state": _state(step),
        "earlier": earlier[-1] if earlier else None,
        "later": later[0].step if later else None,
        "judged": links.measures_at_a_glance(measures, values[comparisons[0]]) if comparisons else [],
        "out_of_date": rendering.OUT_OF_DATE if measurements.is_out_of_date(viewing.session, key) else None,
        "lint": lint_of_step(viewing, run_id, number, step.attempt),
        "comparisons": comparisons,
        "sampled": [name for name, table in curves.by_comparison().items() if table.array("from_sample")[0]],
        "measures": measures,
        "ranges_note": ranges.ranges_note("k3_kl", run.model_kind),
        "intervals_note": links.INTERVALS_NOTE,
        "tails_note": f"k̂ above {ranges.required_range('pareto_k', run.model_kind).critical} and ratios that reach e: "
        "means of ratios and effective sample sizes cannot be trusted.",
        "step_measures": _of_rollouts(values.get(STEP_ROW, {})),
        "figures": [
            _plot(f"/pages/runs/{run_id}/steps/{number}/figures", name, plot)
            for name, plot in figures.STEP_PLOTS.items()
        ],
        "attribution": attribution,
        "conclusions": [] if attribution is None else links.sentences_of(attribution),
        "links_notes": [] if attribution is None else links.notes_of(attribution),
        "doctor": doctor_of_step(viewing, key),
        "grafana_address": alerts.run_dashboard(viewing.context.settings, run.id),
    }


def worst_tokens(viewing: Viewing, run_id: str, step: int) -> dict[str, Any]:
    """Return the tokens of trainer/rollout that differ most, with every scorer's log-prob; reads the step's shards.

    `rows`: sample id, position, token id, d, then the log-prob of each scorer. `rollouts`: sample id, largest |d|, k3,
    length and reward, largest |d| first. `addresses` of rollouts are keyed by sample id.
    """
    run = runs.get_run(viewing.session, viewing.principal, run_id)
    query = TokenQuery(run_id, step, None, TRAINER_ROLLOUT, WORST_TOKENS, None)
    try:
        found = find_tokens(viewing.context, viewing.principal, query)
    except measurements.MeasurementNotFound as error:
        return {"rows": (), "missing": f"{error.detail}."}
    table = found.table
    names, token_ids = table.strings("sample_id"), table.array("token_id").tolist()
    floats = [columnar.floats_or_none(values) for values in (table.array("d"), *map(found.log_probs, found.scorers))]
    rollouts = _worst_rollouts(viewing, events.StepKey(run_id, found.attempt, step))
    address = page_addresses.run_page_path(run.project, run.key)
    return {
        "comparison": TRAINER_ROLLOUT,
        "missing": "The step has no token with two finite log-probs.",
        "scorers": found.scorers,
        "rows": list(zip(names, table.array("position").tolist(), token_ids, *floats, strict=True)),
        "texts": rollout.token_texts(viewing, run, found.attempt, token_ids),
        "within": "" if found.coverage.rests_on == "all tokens" else f"Among {found.coverage.text} in full.",
        "rollouts": rollouts,
        "addresses": {
            name: rollout.rollout_address(address, step, name) for name in (*names, *(each[0] for each in rollouts))
        },
    }


def _worst_rollouts(viewing: Viewing, key: events.StepKey) -> list[tuple[str, float, float, int, float]]:
    """Return the rollouts with the largest max |d|."""
    packed = measurements.blobs_of_steps(viewing.session, [key], TRAINER_ROLLOUT, "summaries").get(key)
    if packed is None:
        return []
    summaries = rollout_summaries.RolloutSummaries.from_bytes(packed)
    largest = np.nan_to_num(summaries.largest_abs_d(), nan=-1.0)
    names = summaries.table.column("sample_id")
    k3, tokens, lengths, rewards = (summaries.column(name) for name in ("sum_k3", "n_tokens", "length", "reward"))
    return [
        (names[row].as_py(), float(largest[row]), float(k3[row] / tokens[row]), int(lengths[row]), float(rewards[row]))
        for row in np.argsort(-largest, kind="stable")[:WORST_ROLLOUTS].tolist()
        if largest[row] >= 0.0
    ]


def _plot(folder: str, name: str, plot: figures.StepPlot) -> view_models.Plot:
    choices = [view_models.Choice(text, f"{folder}/{each}.json") for each, text in plot.choices.items()]
    return view_models.Plot(name, plot.title, f"{folder}/{name}.json", plot.wide, choices)


def _of_rollouts(values: Mapping[str, float | None]) -> list[tuple[str, str]]:
    return [
        (measure.name.replace("_", " "), links.measure_value(measure.column, value, None).text)
        for measure in registry.STEP_MEASURES
        if measure.name not in IN_THE_HEADER and (value := values.get(measure.column)) is not None
    ]


def _state(step: StepRecord) -> view_models.Label:
    if step.closed:
        if step.shards >= step.expected_shards:
            return view_models.Label("closed", "good")
        return view_models.Label(f"closed with {steps.shards_in_words(step.shards, step.expected_shards)}", "warning")
    return view_models.Label("waiting for shards", live=True)
