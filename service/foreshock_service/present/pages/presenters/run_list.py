"""The list of runs, and the comparison of runs."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any
from urllib.parse import urlencode

from foreshock.api import diagnosis
from foreshock.diagnosis import mismatch_rules, quantities
from foreshock_service.platform.database.tables import Run
from foreshock_service.platform.problem import InvalidRequest
from foreshock_service.present.pages import figures, rendering, view_models
from foreshock_service.present.pages.figures import drawing, mismatch
from foreshock_service.present.pages.presenters.figures import FigureNotFound
from foreshock_service.present.pages.presenters.run import pooled_in_words
from foreshock_service.present.pages.presenters.viewing import Viewing, last_steps, quantity_curves
from foreshock_service.runs import diagnoses, listing, measurements, steps
from foreshock_service.runs.attempts import attempts_of_run, fingerprints_of_attempts
from foreshock_service.runs.runs import every_run, get_run, run_records
from foreshock_service.watch.advice.service import states_of_runs
from foreshock_service.watch.detection.states import observed_steps

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
            view_models.Plot(name, each.title, f"/pages/compare/{name}.json?{query}", name == "reward", over_steps=True)
            for name, each in COMPARED.items()
        ],
        "different": {name: values for name, values in rows.items() if len(set(values)) > 1},
        "equal": {name: values for name, values in rows.items() if len(set(values)) == 1},
    }


def compared_figure(viewing: Viewing, name: str, run_ids: Sequence[str]) -> figures.Figure | figures.Missing:
    """Return the curves of a quantity, a line for each run. Raises FigureNotFound."""
    if name not in COMPARED:
        raise FigureNotFound(f"unknown figure {name!r}; figures: {', '.join(COMPARED)}")
    asked = COMPARED[name]
    runs = chosen_runs(viewing, run_ids)
    curves = [(run.name or run.key, quantity_curves(viewing, run, (asked.quantity,))[asked.quantity]) for run in runs]
    return mismatch.comparison_figure(asked.title, asked.unit, curves, logarithmic=asked.logarithmic)


def _rows(viewing: Viewing, runs: Sequence[Run]) -> dict[str, list[str]]:
    """Return the settings, then the fields of the newest attempt's fingerprint, with their value in each run."""
    pooled = measurements.pooled_mismatch(viewing.session, [run.id for run in runs])
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
    columns = [{**setting, **fingerprint} for setting, fingerprint in zip(settings, fingerprints, strict=True)]
    names = dict.fromkeys(name for part in (settings, fingerprints) for column in part for name in column)
    return {name: [_text(column.get(name)) for column in columns] for name in names}


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


RUNS_ON_A_PAGE = 50
VERDICTS: tuple[diagnosis.Verdict, ...] = ("critical", "warning", "unknown", "healthy")
"""The worst first."""
SORTS = ("verdict", "name", "reward", "k3", "step", "age", "scale")
GROUPS = ("project", "model", "tag")


@dataclass(frozen=True, slots=True)
class RunsQuery:
    """A visitor's filter, order and page of the list; empty: no restriction. A leading "-" reverses `sort`."""

    search: str = ""
    project: str = ""
    model: str = ""
    tag: str = ""
    state: str = ""
    verdict: str = ""
    sort: str = ""
    group: str = ""
    page: int = 1

    @property
    def is_filtered(self) -> bool:
        return any((self.search, self.project, self.model, self.tag, self.state, self.verdict))

    def address(self, **changes: str | int) -> str:
        """Return the address of the list with these changes, on its first page unless `changes` names a page."""
        asked = {**asdict(self), "page": 1, **changes}
        given = {name: value for name, value in asked.items() if value and (name, value) != ("page", 1)}
        return f"/?{urlencode(given)}" if given else "/"

    def matches(self, run: Run, verdict: str) -> bool:
        """Return whether a run passes the filter."""
        return (
            self.search.casefold() in f"{run.name or ''}\n{run.key}".casefold()
            and self.project in ("", run.project)
            and self.model in ("", run.model)
            and (not self.tag or self.tag in run.tags)
            and self.state in ("", run.state)
            and self.verdict in ("", verdict)
        )

    def group_of(self, run: Run) -> str:
        """Return the name of the run's group; empty without groups."""
        if self.group == "tag":
            return run.tags[0] if run.tags else "no tag"
        return str(getattr(run, self.group) or "not declared") if self.group else ""


def runs_page(viewing: Viewing, query: RunsQuery) -> dict[str, Any]:
    """Return one page of the runs that the visitor may see, the worst first unless another order is requested.

    `projects`, `models` and `tags` are the choices of the filters.
    """
    session, visible = viewing.session, every_run(viewing.session, viewing.principal.projects(None))
    verdicts = diagnoses.verdicts_of_runs(session, [run.id for run in visible])
    chosen = [run for run in visible if query.matches(run, verdicts[run.id].verdict)]
    # The worst first, then the newest. The later sorts are stable: equal runs keep this order.
    chosen.sort(key=lambda run: (VERDICTS.index(verdicts[run.id].verdict), -_active_at(run), run.id))
    name = query.sort.removeprefix("-")
    if name in SORTS[1:]:
        values = _sorted_by(viewing, name, chosen)
        known = [run for run in chosen if values.get(run.id) is not None]
        unknown = [run for run in chosen if values.get(run.id) is None]
        # By default names ascend and numbers descend.
        chosen = sorted(known, key=lambda run: values[run.id], reverse=(name == "name") == query.sort.startswith("-"))
        chosen += unknown
    elif query.sort == "-verdict":
        chosen.reverse()
    in_group = Counter(query.group_of(run) for run in chosen)
    if query.group in GROUPS:
        order = {group: place for place, group in enumerate(in_group)}
        chosen.sort(key=lambda run: order[query.group_of(run)])
    pages = max(1, -(-len(chosen) // RUNS_ON_A_PAGE))
    first = (min(query.page, pages) - 1) * RUNS_ON_A_PAGE
    return {
        "query": replace(query, page=min(query.page, pages)),
        "rows": _rows_of(viewing, query, chosen[first : first + RUNS_ON_A_PAGE]),
        "total": len(chosen),
        "pages": pages,
        "in_group": in_group,
        "projects": sorted({run.project for run in visible}),
        "models": sorted({run.model for run in visible if run.model}),
        "tags": sorted({tag for run in visible for tag in run.tags}),
    }


def _active_at(run: Run) -> int:
    return max(run.last_shard_at_us or 0, run.seen_at_us or 0, run.created_at_us)


def _sorted_by(viewing: Viewing, name: str, runs: Sequence[Run]) -> Mapping[str, Any]:
    """Return the sort value of each run; a run without one comes last."""
    if name in listing.QUANTITIES:
        return listing.newest_or_reported(viewing.session, name, last_steps(viewing.session, runs))
    if name == "scale":
        return _scales(viewing, runs)
    if name == "step":
        return last_steps(viewing.session, runs)
    return {run.id: _active_at(run) if name == "age" else (run.name or run.key).casefold() for run in runs}


def _scales(viewing: Viewing, runs: Sequence[Run]) -> dict[str, float]:
    """Return the advised scale of each run's next step; runs without a closed step are absent."""
    run_ids = [run.id for run in runs]
    observed = observed_steps(viewing.session, run_ids)
    states = states_of_runs(viewing.session, list(observed))
    return {run_id: states[run_id].scale(step + 1) for run_id, step in observed.items()}


def _rows_of(viewing: Viewing, query: RunsQuery, runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return the rows of the list; `newest` and `paths` are keyed by quantity."""
    tokens = {run.id: run.tokens for run in runs}
    versions = {run_id: (step, tokens[run_id]) for run_id, step in last_steps(viewing.session, runs).items()}
    curves = listing.short_curves(viewing.session, versions)
    paths = {
        name: drawing.spark_paths(
            {run: of[name].points for run, of in curves.items() if name in of}, logarithmic=name == "k3"
        )
        for name in listing.QUANTITIES
    }
    scales = _scales(viewing, runs)
    incomplete = steps.incomplete_counts(viewing.session, [run.id for run in runs])
    groups = [query.group_of(run) for run in runs]
    return [
        {
            "run": record,
            "active_at": rendering.moment(_active_at(run)),
            "newest": {name: curve.newest for name, curve in curves.get(run.id, {}).items()},
            "paths": {name: of_runs[run.id] for name, of_runs in paths.items() if run.id in of_runs},
            "scale": scales.get(run.id),
            "incomplete": incomplete.get(run.id, 0),
            "group": groups[at],
            "is_first_of_group": bool(query.group) and (at == 0 or groups[at] != groups[at - 1]),
        }
        for at, (run, record) in enumerate(zip(runs, run_records(viewing.session, runs), strict=True))
    ]
