"""The presenter of several runs side by side: their curves by step, and their differing settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

from foreshock.comparisons import STEP_ROW, TRAINER_ROLLOUT
from foreshock.page_addresses import run_page_path
from foreshock_service.platform.database.tables import Run
from foreshock_service.platform.problem import InvalidRequest
from foreshock_service.present.pages.figures import Curve, Figure, Missing
from foreshock_service.present.pages.figures.comparison import comparison_figure
from foreshock_service.present.pages.formatting import DASH, number
from foreshock_service.present.pages.list_models import ComparedRun, ComparePage, DifferenceRow
from foreshock_service.present.pages.presenters.curves import curves_of, first_of, scalar_curves
from foreshock_service.present.pages.presenters.figures import FigureNotFound
from foreshock_service.present.pages.presenters.health import pooled_in_words
from foreshock_service.present.pages.presenters.signals import ENTROPIES, GRADIENT_NORMS, REWARDS
from foreshock_service.present.pages.presenters.viewing import Viewing
from foreshock_service.present.pages.view_models import Plot
from foreshock_service.runs.attempts.service import attempts_of_run, fingerprints_of_attempts
from foreshock_service.runs.health.service import pooled_mismatch
from foreshock_service.runs.runs.service import get_run

MOST_RUNS = 20


@dataclass(frozen=True, slots=True)
class Compared:
    """A measured quantity that runs are compared by, and the names by which trainers report it."""

    title: str
    unit: str
    comparison: str = STEP_ROW
    column: str = ""
    scalars: tuple[str, ...] = ()
    logarithmic: bool = False


QUANTITIES: Mapping[str, Compared] = {
    "reward": Compared("Reward", "reward", column="reward_mean", scalars=REWARDS),
    "k3": Compared("Mismatch per token (k3)", "k3, nats per token", TRAINER_ROLLOUT, "k3_kl", logarithmic=True),
    "length": Compared("Response length", "tokens per response", column="response_length_mean"),
    "entropy": Compared("Entropy", "nats per token", column="entropy_mean", scalars=ENTROPIES),
    "gradient-norm": Compared("Gradient norm", "gradient norm", scalars=GRADIENT_NORMS, logarithmic=True),
}


def chosen_runs(viewing: Viewing, run_ids: Sequence[str]) -> list[Run]:
    """Return the runs to compare, each once. Raises RunNotFound, and InvalidRequest for none or too many."""
    unique = list(dict.fromkeys(run_ids))
    if not 1 <= len(unique) <= MOST_RUNS:
        raise InvalidRequest(f"query.run: expected 1 to {MOST_RUNS} runs, got {len(unique)}; tick them in the list")
    return [get_run(viewing.session, viewing.principal, run_id) for run_id in unique]


def compare_page(viewing: Viewing, run_ids: Sequence[str]) -> ComparePage:
    """Return the page of these runs."""
    runs = chosen_runs(viewing, run_ids)
    query = urlencode([("run", run.id) for run in runs])
    rows = _rows(viewing, runs)
    return ComparePage(
        runs=[
            ComparedRun(run.name or run.key, run_page_path(run.project, run.key), at % 6 + 1)
            for at, run in enumerate(runs)
        ],
        figures=[
            Plot(name, each.title, f"/pages/compare/{name}.json?{query}", name == "reward", over_steps=True)
            for name, each in QUANTITIES.items()
        ],
        different=[row for row in rows if len(set(row.values)) > 1],
        equal=[row for row in rows if len(set(row.values)) == 1],
    )


def compared_figure(viewing: Viewing, name: str, run_ids: Sequence[str]) -> Figure | Missing:
    """Return the curves of a quantity, a line for each run. Raises FigureNotFound."""
    if name not in QUANTITIES:
        raise FigureNotFound(f"unknown figure {name!r}; figures: {', '.join(QUANTITIES)}")
    asked = QUANTITIES[name]
    curves = [(run.name or run.key, _curve(viewing, run.id, asked)) for run in chosen_runs(viewing, run_ids)]
    return comparison_figure(asked.title, asked.unit, curves, logarithmic=asked.logarithmic)


def _curve(viewing: Viewing, run_id: str, asked: Compared) -> Curve:
    if asked.column:
        found = curves_of(viewing, run_id, (asked.column,), (asked.comparison,)).get(asked.comparison, {})
        if found.get(asked.column):
            return found[asked.column]
    return first_of(scalar_curves(viewing, run_id, asked.scalars), asked.scalars) if asked.scalars else Curve((), ())


def _rows(viewing: Viewing, runs: Sequence[Run]) -> list[DifferenceRow]:
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


def _table(columns: Sequence[Mapping[str, Any]]) -> list[DifferenceRow]:
    names = dict.fromkeys(name for column in columns for name in column)
    return [DifferenceRow(name, [_text(column.get(name)) for column in columns]) for name in names]


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
        return DASH
    return number(value) if isinstance(value, float) else str(value)
