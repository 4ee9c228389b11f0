"""The page of a step."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from foreshock import healthy_ranges, page_addresses
from foreshock.api.attribution import AttributionRecord
from foreshock.comparisons import STEP_ROW, TRAINER_ROLLOUT
from foreshock.diagnosis.changes import change_in_words
from foreshock.diagnosis.differences import new_worst_in_words
from foreshock.measures import registry, rollout_summaries
from foreshock.measures.estimators.bootstrap import interval_warning
from foreshock_service.platform import columnar, problem
from foreshock_service.platform.database.tables import Run
from foreshock_service.present.pages import rendering
from foreshock_service.present.pages.figures.mismatch import known_first, shown_comparisons
from foreshock_service.present.pages.presenters import alerts, figures, rollout
from foreshock_service.present.pages.presenters import attribution as links
from foreshock_service.present.pages.presenters.findings import doctor_of_step, lint_of_step
from foreshock_service.present.pages.presenters.viewing import Viewing
from foreshock_service.runs import changes, events, measurements, runs, steps
from foreshock_service.runs.curves import CurveQuery, read_curves
from foreshock_service.runs.tokens import TokenQuery, find_tokens

# The previous step is searched at most this many steps back.
FURTHEST_BACK = 500


class StepNotFound(problem.ProblemError, status=404, problem_type="step-not-found"):
    """The run has no rollouts of this step."""


_DIFFERENCES: Mapping[str, tuple[str, ...]] = {
    STEP_ROW: (
        "response_length_mean", "response_length_p50", "response_length_p90", "response_length_max",
        "truncated_fraction", "reward_mean", "entropy_mean", "lag_mean",
    ),
    TRAINER_ROLLOUT: ("k3_kl", "mean_abs_d", "max_abs_d"),
}  # fmt: skip
"""Measures that are shown beside those of the step before, by comparison."""
_WORST_IDS = 10
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
        newest = "" if run.last_step is None else f"; its newest step with rollouts is {run.last_step}"
        raise StepNotFound(f"the run has no rollouts of step {number}{newest}")
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
    found = links.attribution_of(viewing, run_id, number)
    attribution = found if isinstance(found, AttributionRecord) else None
    key = events.StepKey(run_id, step.attempt, number)
    measures = links.measure_groups(values, comparisons, run.model_kind)
    return {
        "run": run,
        "step": step,
        "shards": steps.shards_in_words(step.shards, step.expected_shards),
        "earlier": earlier[-1] if earlier else None,
        "changed": _changed(viewing, run, earlier[-1], key, values) if earlier else None,
        "later": later[0].step if later else None,
        "judged": links.measures_at_a_glance(measures, values[comparisons[0]]) if comparisons else [],
        "out_of_date": rendering.OUT_OF_DATE if measurements.is_out_of_date(viewing.session, key) else None,
        "lint": lint_of_step(viewing, run_id, number, step.attempt),
        "comparisons": comparisons,
        "sampled": [name for name, table in curves.by_comparison().items() if table.array("from_sample")[0]],
        "measures": measures,
        "ranges_note": healthy_ranges.ranges_note("k3_kl", run.model_kind),
        "intervals_note": links.INTERVALS_NOTE,
        "interval_warning": interval_warning(values[comparisons[0]]) if comparisons else None,
        "tails_note": f"k̂ above {healthy_ranges.required_range('pareto_k', run.model_kind).critical} and ratios that "
        "reach e: means of ratios and effective sample sizes cannot be trusted.",
        "step_measures": _of_rollouts(values.get(STEP_ROW, {})),
        "figures": figures.places_of_step(run_id, number),
        "attribution": attribution,
        "conclusions": [] if attribution is None else links.sentences_of(attribution),
        "links_notes": [] if attribution is None else links.notes_of(attribution),
        "doctor": doctor_of_step(viewing, key),
        "grafana_address": alerts.run_dashboard(viewing.context.settings, run.id),
    }


def _changed(
    viewing: Viewing, run: Run, before: int, key: events.StepKey, values: Mapping[str, Mapping[str, float | None]]
) -> dict[str, Any]:
    """Return the difference from the step `before`: changes in words, measures before and now, and worst token ids.

    `values`: the step's measures by comparison. `tokens`: a sentence; None if a step has no statistics of its tokens.
    """
    query = CurveQuery(
        comparisons=[*_DIFFERENCES], measures=sum(_DIFFERENCES.values(), ()), from_step=before, to_step=before
    )
    curves = read_curves(viewing.session, viewing.context, viewing.principal, run.id, query)
    rows = []
    for comparison, table in curves.by_comparison().items():
        for column in _DIFFERENCES[comparison]:
            (old,), new = columnar.floats_or_none(table.array(column)), values.get(comparison, {}).get(column)
            if old is not None or new is not None:
                shown = [links.measure_value(column, each, run.model_kind).text for each in (old, new)]
                rows.append((registry.measure_named(column).name.replace("_", " "), *shown))
    tables = [rollout.statistics_of_step(viewing, run, each) for each in (before, key.step)]
    old_ids, ids = (
        [] if isinstance(each, str) else each.token_id_table(_WORST_IDS).token_ids.tolist() for each in tables
    )
    names = rollout.token_texts(viewing, run, key.attempt, ids) or {}
    return {
        "setup": [change_in_words(each) for each in changes.changes_at(viewing.session, run.id, key.step)],
        "rows": rows,
        "tokens": new_worst_in_words(old_ids, ids, names) if old_ids and ids else None,
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


def _of_rollouts(values: Mapping[str, float | None]) -> list[tuple[str, str]]:
    return [
        (measure.name.replace("_", " "), links.measure_value(measure.column, value, None).text)
        for measure in registry.STEP_MEASURES
        if measure.name not in IN_THE_HEADER and (value := values.get(measure.column)) is not None
    ]
