"""The comparison of runs."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

from foreshock import interval_names
from foreshock.diagnosis import mismatch_rules, quantities
from foreshock.diagnosis.differences import apart_in_words, apart_since
from foreshock.measures.pooling import PooledMean
from foreshock_service.platform.database.tables import Run
from foreshock_service.platform.problem import InvalidRequest
from foreshock_service.present.pages import figures, rendering
from foreshock_service.present.pages.figures import drawing, mismatch
from foreshock_service.present.pages.presenters.figures import FigureNotFound, Place
from foreshock_service.present.pages.presenters.viewing import Viewing, quantity_curves
from foreshock_service.runs import measurements
from foreshock_service.runs.attempts import attempts_of_run, fingerprints_of_attempts
from foreshock_service.runs.diagnoses import verdicts_of_runs
from foreshock_service.runs.runs import get_run

MOST_COMPARED = 20


@dataclass(frozen=True, slots=True)
class Compared:
    """A quantity by which runs are compared."""

    title: str
    unit: str
    quantity: str
    logarithmic: bool = False


COMPARED: Mapping[str, Compared] = {
    "reward": Compared("Reward", "reward", quantities.REWARD_KEY),
    "k3": Compared("Mismatch per token (k3)", "k3, nats per token", mismatch_rules.K3, logarithmic=True),
    "length": Compared("Response length", "tokens per response", quantities.LENGTH_KEY),
    "entropy": Compared("Entropy", "nats per token", quantities.ENTROPY_KEY),
    "gradient-norm": Compared("Gradient norm", "gradient norm", quantities.GRADIENT_NORM_KEY, logarithmic=True),
}


def chosen_runs(viewing: Viewing, run_ids: Sequence[str]) -> list[Run]:
    """Return the runs to compare, each once. Raises RunNotFound, and InvalidRequest for none or too many."""
    unique = list(dict.fromkeys(run_ids))
    if not 1 <= len(unique) <= MOST_COMPARED:
        raise InvalidRequest(f"query.run: expected 1 to {MOST_COMPARED} runs, got {len(unique)}; tick them in the list")
    return [get_run(viewing.session, viewing.principal, run_id) for run_id in unique]


def compare_page(viewing: Viewing, run_ids: Sequence[str]) -> dict[str, Any]:
    """Return runs side by side: curves by step, and settings with their value in each run, by name."""
    runs = chosen_runs(viewing, run_ids)
    query = urlencode([("run", run.id) for run in runs])
    rows = _rows(viewing, runs)
    return {
        "runs": runs,
        "figures": [
            Place(name, each.title, f"/pages/compare/{name}.json?{query}", name == "reward", over_steps=True)
            for name, each in COMPARED.items()
        ],
        "verdicts": verdicts_of_runs(viewing.session, [run.id for run in runs]),
        "apart": _apart(viewing, runs),
        "different": {name: values for name, values in rows.items() if len(set(values)) > 1},
        "equal": {name: values for name, values in rows.items() if len(set(values)) == 1},
    }


def _apart(viewing: Viewing, runs: Sequence[Run]) -> list[list[str]]:
    """Return, for each run but the first, since when its reward and its mismatch differ from those of the first."""
    keys = {COMPARED[name].quantity: COMPARED[name] for name in ("reward", "k3")}
    found = [quantity_curves(viewing, run, [*keys]) for run in runs]
    sentences: list[list[str]] = [[] for _ in runs[1:]]
    for key, asked in keys.items():
        first, *others = (dict(curves[key].points()) for curves in found)
        for place, other in enumerate(others):
            if common := first.keys() & other.keys():
                sides = (_logs(first), _logs(other)) if asked.logarithmic else (first, other)
                sentences[place].append(apart_in_words(asked.title, apart_since(*sides), min(common)))
    return sentences


def _logs(points: Mapping[int, float]) -> dict[int, float]:
    return {step: math.log(value) for step, value in points.items() if value > 0}


def compared_figure(viewing: Viewing, name: str, run_ids: Sequence[str]) -> figures.Figure | figures.Missing:
    """Return the curves of a quantity, a line for each run. Raises FigureNotFound."""
    if name not in COMPARED:
        raise FigureNotFound(f"unknown figure {name!r}; figures: {', '.join(COMPARED)}")
    asked = COMPARED[name]
    runs = chosen_runs(viewing, run_ids)
    curves = [
        (run.name or run.key, drawing.thinned(quantity_curves(viewing, run, (asked.quantity,))[asked.quantity]))
        for run in runs
    ]
    return mismatch.comparison_figure(asked.title, asked.unit, curves, logarithmic=asked.logarithmic)


def _rows(viewing: Viewing, runs: Sequence[Run]) -> dict[str, list[str]]:
    """Return the settings, then the fields of the newest attempt's fingerprint, with their value in each run."""
    pooled = measurements.pooled_mismatch(viewing.session, [run.id for run in runs])
    settings = [
        {
            "project": run.project, "state": run.state, "model": run.model, "model kind": run.model_kind,
            "trainer": run.trainer, "engine": run.engine, "hardware": run.hardware,
            "initial learning rate": run.initial_learning_rate, "length cap": run.length_cap,
            "last step": run.last_step, "k3 of the newest steps": _pooled_in_words(pooled.get(run.id)),
        }
        for run in runs
    ]  # fmt: skip
    fingerprints = [_fingerprint(viewing, run.id) for run in runs]
    columns = [{**setting, **fingerprint} for setting, fingerprint in zip(settings, fingerprints, strict=True)]
    names = dict.fromkeys(name for part in (settings, fingerprints) for column in part for name in column)
    return {name: [_text(column.get(name)) for column in columns] for name in names}


def _pooled_in_words(pooled: PooledMean | None) -> str | None:
    if pooled is None:
        return None
    if pooled.high != pooled.high:
        return rendering.number(pooled.mean)
    words = interval_names.range_in_words(pooled.mean, pooled.low, pooled.high, rendering.number)
    return f"{rendering.number(pooled.mean)} ({words})"


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
