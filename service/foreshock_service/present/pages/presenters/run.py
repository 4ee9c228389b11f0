"""The page of a run: its stored diagnosis and alerts, the advice, and places for its figures."""

from collections.abc import Sequence
from typing import Any
from urllib.parse import urlencode

from foreshock import page_addresses
from foreshock.api.runs import IncompleteStep, WeightsRecord
from foreshock.diagnosis.episodes import episodes_of
from foreshock.diagnosis.references import reference_sentence
from foreshock_service.platform.database.tables import Run
from foreshock_service.present.pages import rendering
from foreshock_service.present.pages.presenters import advice, alerts, figures
from foreshock_service.present.pages.presenters.findings import LintPanel, doctor_of_run, lint_of_run
from foreshock_service.present.pages.presenters.viewing import Viewing
from foreshock_service.replay.probes import policies, service
from foreshock_service.runs import changes, events, measurements, runs, scalars, steps, weights
from foreshock_service.runs.attempts import attempts_of_run
from foreshock_service.watch.diagnosis import diagnosis_of_run

MOST_PROBES = 20
WEIGHTS_STEPS = 12
"""Number of newest weight syncs in the table of engines."""
MOST_CURVES, CURVES_OF_A_FIGURE = 240, 12


def run_page(viewing: Viewing, run_id: str) -> dict[str, Any]:
    """Return the page of a run. Raises RunNotFound or RunDeleted.

    `healthy_run`: the newest healthy run of the same project and model, to compare with if no baseline is set.
    """
    session = viewing.session
    run = runs.get_run(session, viewing.principal, run_id)
    (record,) = runs.run_records(session, [run])
    attempts, statistics, baseline = attempts_of_run(session, run_id), None, _baseline(viewing, run)
    if record.last_step is not None:
        found = steps.statistics_steps(session, run_id)
        statistics = f"Step {found[0].step}: {found[0].text}." if found else None
    standing = alerts.standing_alerts(viewing, run_id)
    healthy = runs.list_runs(session, runs.RunFilter((run.project,), model=run.model, verdict="healthy"), None, 2).items
    return {
        "run": record,
        "address": page_addresses.run_page_path(run.project, run.key),
        "model_kind": rendering.model_kind_in_words(run),
        "attempt": attempts[-1].attempt if attempts else None,
        "baseline": None if baseline is None else runs.run_records(session, [baseline])[0],
        "healthy_run": next((each for each in healthy if each.id != run.id), None),
        "diagnosis": diagnosis_of_run(session, run_id),
        "alerts": len(standing),
        "episodes": [each[: alerts.SHOWN_OF_EPISODE] for each in episodes_of(standing)[: alerts.SHOWN_EPISODES]],
        "advice": advice.advice_panel(viewing, run, baseline),
        "incomplete": _incomplete(viewing, run_id, steps.incomplete_steps(session, run_id)),
        "coverage": statistics,
        "reference": reference_sentence(changes.engine_of_newest_step(session, run_id), run.model_kind),
        "changes": [f"step {mark.step}, {mark.text}" for mark in reversed(alerts.changes_of(viewing, run_id))],
        "engines": _engines_table(weights.weights_of_newest_steps(session, run_id, WEIGHTS_STEPS)),
        "out_of_date": rendering.OUT_OF_DATE if measurements.is_run_out_of_date(session, run_id) else None,
        "grafana_address": alerts.run_dashboard(viewing.context.settings, run_id),
        "figures": [
            figures.Place(name, plot.title, f"/pages/runs/{run_id}/figures/{name}.json", over_steps=plot.over_steps)
            for name, plot in figures.RUN_PLOTS.items()
        ],
    }


def _baseline(viewing: Viewing, run: Run) -> Run | None:
    """Return the run to compare with; None if there is none, it was deleted, or the visitor may not see it."""
    found = runs.find_run(viewing.session, run.baseline) if run.baseline else None
    if found is None or found.deleted_at_us is not None or not viewing.principal.sees(found.project):
        return None
    return found


def _engines_table(records: Sequence[WeightsRecord]) -> dict[str, Any] | None:
    """Return the weights that engines held after the newest syncs: a row an engine, a column a step; None: no report.

    `sentences` are about the engines that held wrong weights at the newest step.
    """
    if not records:
        return None
    steps = sorted({each.step for each in records})
    found = {(each.engine, each.step): each for each in records}
    names = sorted({each.engine for each in records}, key=lambda name: (len(name), name))
    return {
        "steps": steps,
        "engines": {name: [found.get((name, step)) for step in steps] for name in names},
        "sentences": [each.sentence for each in records if each.step == steps[-1] and not each.is_right],
    }


def _incomplete(viewing: Viewing, run_id: str, found: Sequence[IncompleteStep]) -> str | None:
    """Return a sentence about the shards that closed steps lack; None if no step lacks any."""
    if not found:
        return None
    newest = found[0]
    key = events.StepKey(run_id, newest.attempt, newest.step)
    absent = steps.missing_shards_of(viewing.session, key, newest.expected_shards)
    text = f"Step {newest.step} closed with {steps.shards_in_words(newest.shards, newest.expected_shards, absent)}"
    others = f", {len(found) - 1} earlier steps lack shards too" if len(found) > 1 else ""
    return f"{text}{others}. Each rank sends one shard; numbers are of the rollouts that arrived."


def probes_part(viewing: Viewing, run_id: str) -> dict[str, Any]:
    run = runs.get_run(viewing.session, viewing.principal, run_id)
    return {
        "run_id": run_id,
        "address": page_addresses.run_page_path(run.project, run.key),
        "policy": policies.policy_in_words(viewing.session, viewing.principal, run_id),
        "probes": service.list_probes(viewing.session, viewing.principal, run_id, None, None, MOST_PROBES).items,
        "doctor": doctor_of_run(viewing, run_id),
    }


def semantics_part(viewing: Viewing, run_id: str) -> LintPanel:
    run = runs.get_run(viewing.session, viewing.principal, run_id)
    return lint_of_run(viewing, run_id, run.last_step, page_addresses.run_page_path(run.project, run.key))


def scalars_part(viewing: Viewing, run_id: str, wanted: str) -> dict[str, Any]:
    """Return the places of the curves of a run's scalars, in groups by the part of the name before its first slash.

    `wanted`: only names with all of these words, in any case. At most MOST_CURVES of them; `total` counts all.
    """
    runs.get_run(viewing.session, viewing.principal, run_id)
    names = scalars.names_of_run(viewing.session, run_id)
    words = wanted.lower().split()
    found = [name for name in names if all(word in name.lower() for word in words)]
    groups: dict[str, list[str]] = {}
    for name in found[:MOST_CURVES]:
        groups.setdefault(name.partition("/")[0] if "/" in name else "", []).append(name)
    address = f"/pages/runs/{run_id}/figures/scalars.json?"
    return {
        "total": len(names),
        "found": len(found),
        "shown": min(len(found), MOST_CURVES),
        "groups": {
            group or "without a group": [
                address + urlencode([("scalar", name) for name in members[first : first + CURVES_OF_A_FIGURE]])
                for first in range(0, len(members), CURVES_OF_A_FIGURE)
            ]
            for group, members in groups.items()
        },
    }
