"""The list of runs, the comparison of runs, and hardware."""

import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

from foreshock import comparisons, interval_names, page_addresses, ranges
from foreshock.api.diagnosis import VERDICTS
from foreshock.api.runs import RunRecord, ShownRunState
from foreshock.learning_rate.decisions import AdviceState
from foreshock_service.platform.database.tables import Run
from foreshock_service.platform.problem import InvalidRequest
from foreshock_service.present.pages import figures, rendering, step_models, view_models
from foreshock_service.present.pages.figures.drawing import sparkline
from foreshock_service.present.pages.figures.mismatch import comparison_figure
from foreshock_service.present.pages.presenters.figures import FigureNotFound
from foreshock_service.present.pages.presenters.run import TONES, pooled_in_words
from foreshock_service.present.pages.presenters.viewing import (
    ENTROPIES,
    GRADIENT_NORMS,
    REWARDS,
    Viewing,
    curves_of,
    first_of,
    scalar_curves,
)
from foreshock_service.replay.probes.workers import hardware_of
from foreshock_service.runs import diagnoses, measurements
from foreshock_service.runs.attempts import attempts_of_run, fingerprints_of_attempts
from foreshock_service.runs.measurements import POOLED_STEPS, PooledMeasure, pooled_mismatch
from foreshock_service.runs.runs import RunFilter, get_run, list_runs
from foreshock_service.runs.steps import incomplete_counts
from foreshock_service.watch.advice.service import states_of_runs
from foreshock_service.watch.alerts import open_counts
from foreshock_service.watch.detection.states import observed_steps

MOST_RUNS = 200


def hardware_page(viewing: Viewing) -> step_models.HardwarePage:
    """Return the newest runs by hardware × configuration, and the accelerators of the workers."""
    runs = list_runs(viewing.session, RunFilter(viewing.principal.projects(None)), None, MOST_RUNS).items
    pooled = pooled_mismatch(viewing.session, [run.id for run in runs])
    groups: defaultdict[tuple[str, str], list[RunRecord]] = defaultdict(list)
    for run in runs:
        names = [each or "not declared" for each in (run.engine, run.trainer, run.model)]
        groups[run.hardware or "not declared", ", ".join(names)].append(run)
    rows = [_configuration(*key, groups[key], pooled) for key in sorted(groups)]
    hardware = hardware_of(viewing.session, viewing.principal)
    return step_models.HardwarePage(
        configurations=[row for _, row in sorted(rows, key=lambda each: -each[0])],
        accelerators=[
            step_models.HardwareRow(
                each.accelerator, ", ".join(each.devices) or "none seen",
                each.workers, each.queued_jobs, each.running_jobs, each.scores,
            )
            for each in hardware.accelerators
        ],
        accelerators_left_out=hardware.accelerators_left_out,
    )  # fmt: skip


def _configuration(
    hardware: str, configuration: str, runs: list[RunRecord], pooled: dict[str, PooledMeasure]
) -> tuple[float, step_models.ConfigurationRow]:
    """Return the largest k3 of these runs, −1 if none is measured, and the row."""
    means = {run.id: pooled[run.id].mean for run in runs if run.id in pooled}
    worst = max(runs, key=lambda run: means.get(run.id, -1.0))
    low, high = min(means.values(), default=None), max(means.values(), default=None)
    text = (
        "not measured"
        if low is None
        else rendering.number(low)
        if low == high
        else f"{rendering.number(low)} to {rendering.number(high)}"
    )
    tone = "" if high is None else rendering.VERDICT_TONES[ranges.verdict_of("k3_kl", high, worst.model_kind)]
    address = page_addresses.run_page_path(worst.project, worst.key)
    row = step_models.ConfigurationRow(hardware, configuration, len(runs), text, tone, worst.name or worst.key, address)
    return -1.0 if high is None else high, row


MOST_COMPARED = 20


@dataclass(frozen=True, slots=True)
class Compared:
    """A measured quantity that runs are compared by, and the names by which trainers report it."""

    title: str
    unit: str
    comparison: str = comparisons.STEP_ROW
    column: str = ""
    scalars: tuple[str, ...] = ()
    logarithmic: bool = False


QUANTITIES: Mapping[str, Compared] = {
    "reward": Compared("Reward", "reward", column="reward_mean", scalars=REWARDS),
    "k3": Compared(
        "Mismatch per token (k3)", "k3, nats per token", comparisons.TRAINER_ROLLOUT, "k3_kl", logarithmic=True
    ),
    "length": Compared("Response length", "tokens per response", column="response_length_mean"),
    "entropy": Compared("Entropy", "nats per token", column="entropy_mean", scalars=ENTROPIES),
    "gradient-norm": Compared("Gradient norm", "gradient norm", scalars=GRADIENT_NORMS, logarithmic=True),
}


def chosen_runs(viewing: Viewing, run_ids: Sequence[str]) -> list[Run]:
    """Return the runs to compare, each once. Raises RunNotFound, and InvalidRequest for none or too many."""
    unique = list(dict.fromkeys(run_ids))
    if not 1 <= len(unique) <= MOST_COMPARED:
        raise InvalidRequest(f"query.run: expected 1 to {MOST_COMPARED} runs, got {len(unique)}; tick them in the list")
    return [get_run(viewing.session, viewing.principal, run_id) for run_id in unique]


def compare_page(viewing: Viewing, run_ids: Sequence[str]) -> step_models.ComparePage:
    """Return the page of these runs."""
    runs = chosen_runs(viewing, run_ids)
    query = urlencode([("run", run.id) for run in runs])
    rows = _rows(viewing, runs)
    return step_models.ComparePage(
        runs=[
            step_models.ComparedRun(run.name or run.key, page_addresses.run_page_path(run.project, run.key), at % 6 + 1)
            for at, run in enumerate(runs)
        ],
        figures=[
            view_models.Plot(name, each.title, f"/pages/compare/{name}.json?{query}", name == "reward", over_steps=True)
            for name, each in QUANTITIES.items()
        ],
        different=[row for row in rows if len(set(row.values)) > 1],
        equal=[row for row in rows if len(set(row.values)) == 1],
    )


def compared_figure(viewing: Viewing, name: str, run_ids: Sequence[str]) -> figures.Figure | figures.Missing:
    """Return the curves of a quantity, a line for each run. Raises FigureNotFound."""
    if name not in QUANTITIES:
        raise FigureNotFound(f"unknown figure {name!r}; figures: {', '.join(QUANTITIES)}")
    asked = QUANTITIES[name]
    curves = [(run.name or run.key, _curve(viewing, run.id, asked)) for run in chosen_runs(viewing, run_ids)]
    return comparison_figure(asked.title, asked.unit, curves, logarithmic=asked.logarithmic)


def _curve(viewing: Viewing, run_id: str, asked: Compared) -> figures.Curve:
    if asked.column:
        found = curves_of(viewing, run_id, (asked.column,), (asked.comparison,)).get(asked.comparison, {})
        if found.get(asked.column):
            return found[asked.column]
    return (
        first_of(scalar_curves(viewing, run_id, asked.scalars), asked.scalars)
        if asked.scalars
        else figures.Curve((), ())
    )


def _rows(viewing: Viewing, runs: Sequence[Run]) -> list[step_models.DifferenceRow]:
    """Return the settings, then the fields of the newest attempt's fingerprint, in every run."""
    pooled = pooled_mismatch(viewing.session, [run.id for run in runs])
    settings = [
        {
            "project": run.project, "state": run.state, "model": run.model, "model kind": run.model_kind,
            "trainer": run.trainer, "engine": run.engine, "hardware": run.hardware,
            "initial learning rate": run.initial_learning_rate, "length cap": run.length_cap,
            "last step": run.last_step, "k3 of the newest steps": pooled_in_words(pooled.get(run.id)),
        }
        for run in runs
    ]  # fmt: skip
    fingerprints = [_fingerprint(viewing, run.id) for run in runs]
    return [*_table(settings), *_table(fingerprints)]


def _table(columns: Sequence[Mapping[str, Any]]) -> list[step_models.DifferenceRow]:
    names = dict.fromkeys(name for column in columns for name in column)
    return [step_models.DifferenceRow(name, [_text(column.get(name)) for column in columns]) for name in names]


def _fingerprint(viewing: Viewing, run_id: str) -> dict[str, Any]:
    attempts = attempts_of_run(viewing.session, run_id)
    if not attempts:
        return {}
    newest = attempts[-1].attempt
    return _flat(fingerprints_of_attempts(viewing.session, run_id, [newest]).get(newest, {}))


def _flat(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, each in value.items():
        if isinstance(each, Mapping):
            flat |= _flat(each, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = each
    return flat


def _text(value: object) -> str:
    if value is None:
        return rendering.DASH
    return rendering.number(value) if isinstance(value, float) else str(value)


RUNS_ON_A_PAGE = 25
STATES: tuple[ShownRunState, ...] = ("running", "stale", "finished", "failed")
REWARD_STEPS = 300
"""The newest steps whose reward is drawn in the list."""


@dataclass(frozen=True, slots=True)
class RunsQuery:
    """What a visitor asks the list for; empty: no restriction."""

    search: str = ""
    project: str = ""
    model: str = ""
    state: str = ""
    verdict: str = ""
    cursor: str | None = None

    def filter(self, projects: tuple[str, ...]) -> RunFilter:
        """Return the filter, within the projects that the visitor may see."""
        states = tuple(each for each in STATES if each == self.state)
        chosen = (*projects, self.project) if self.project else projects
        verdict = next((each for each in VERDICTS if each == self.verdict), None)
        return RunFilter(chosen, model=self.model or None, states=states, search=self.search or None, verdict=verdict)

    def address(self, cursor: str) -> str:
        """Return the address of the next page of the same query."""
        asked = {
            "search": self.search, "project": self.project, "model": self.model, "state": self.state,
            "verdict": self.verdict,
        }  # fmt: skip
        return f"/?{urlencode({name: value for name, value in (*asked.items(), ('cursor', cursor)) if value})}"


def runs_page(viewing: Viewing, query: RunsQuery) -> step_models.RunsPage:
    """Return one page of the runs that the visitor may see, newest first. Raises InvalidCursor."""
    projects = viewing.principal.projects(None)
    chosen = query.filter(projects)
    found = list_runs(viewing.session, chosen, query.cursor, RUNS_ON_A_PAGE)
    run_ids = [run.id for run in found.items]
    mismatch = pooled_mismatch(viewing.session, run_ids)
    observed = observed_steps(viewing.session, run_ids)
    states = states_of_runs(viewing.session, run_ids)
    alerts = open_counts(viewing.session, run_ids)
    incomplete = incomplete_counts(viewing.session, run_ids)
    rewards = measurements.newest_steps(viewing.session, run_ids, comparisons.STEP_ROW, ("reward_mean",), REWARD_STEPS)
    return step_models.RunsPage(
        runs=[
            _row(
                run,
                mismatch.get(run.id),
                _advice(run, states[run.id], observed.get(run.id)),
                alerts[run.id],
                incomplete.get(run.id, 0),
                _values(rewards.get(run.id, ())),
            )
            for run in found.items
        ],
        filter=step_models.RunsFilter(
            query.search, query.project, query.model, query.state, chosen.verdict or "", STATES, VERDICTS
        ),
        filtered=chosen != RunFilter(projects),
        next_address=query.address(found.next_cursor) if found.next_cursor else None,
        live=query.cursor is None,
    )


def _values(steps: Sequence[measurements.MeasuredStep]) -> figures.Curve:
    known = {step.key.step: value for step in steps if (value := step.values["reward_mean"]) is not None}
    return figures.Curve(list(known), list(known.values()))


def _row(
    run: RunRecord,
    mismatch: PooledMeasure | None,
    advice: str | None,
    alerts: Counter[str],
    incomplete: int,
    reward: figures.Curve,
) -> step_models.RunRow:
    said = run.diagnosis or diagnoses.NOTHING_YET
    newest = [value for _, value in reward.points()[-POOLED_STEPS:]]
    # The caption of the table says what the range is.
    mean, _, interval = (pooled_in_words(mismatch) or "").partition(f" ({interval_names.RANGE}")
    steps = "1 step incomplete" if incomplete == 1 else f"{incomplete} steps incomplete"
    return step_models.RunRow(
        id=run.id,
        name=run.name or run.key,
        address=page_addresses.run_page_path(run.project, run.key),
        project=run.project,
        state=rendering.label_of(run.state, rendering.RUN_STATES),
        model=run.model,
        trainer=run.trainer,
        engine=run.engine,
        last_step=run.last_step,
        mismatch=mean or None,
        interval=interval.removesuffix(")"),
        reward=rendering.number(statistics.median(newest)) if newest else None,
        reward_path=sparkline(reward),
        incomplete=view_models.Label(steps, "warning") if incomplete else None,
        advice=advice,
        verdict=view_models.Label(said.verdict, TONES[said.verdict]),
        headline=said.headline,
        alerts=rendering.alerts_label(alerts),
        started=rendering.moment(run.created_at_us),
    )


def _advice(run: RunRecord, state: AdviceState, observed_step: int | None) -> str | None:
    """Return the scale that the advice has for the next step; None before the first closed step."""
    if observed_step is None:
        return None
    shadow = ", shadow" if run.advice_mode == "shadow" else ""
    return f"× {rendering.number(state.scale(observed_step + 1))}{shadow}"
