"""The list of runs."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any
from urllib.parse import urlencode

from fastapi import Query

from foreshock.api import diagnosis
from foreshock_service.platform import parameters
from foreshock_service.platform.database.tables import Run
from foreshock_service.present.pages.figures import drawing
from foreshock_service.present.pages.presenters.viewing import Viewing, last_steps
from foreshock_service.runs import diagnoses, listing, steps
from foreshock_service.runs.runs import every_run, run_records
from foreshock_service.watch.advice.service import states_of_runs
from foreshock_service.watch.detection.states import observed_steps

Text = Annotated[str, Query(max_length=200, pattern=parameters.NO_NUL)]
RUNS_ON_A_PAGE = 50
VERDICTS: tuple[diagnosis.Verdict, ...] = ("critical", "warning", "unknown", "healthy")
"""The worst first."""
SORTS = ("verdict", "name", "reward", "k3", "step", "age", "scale")
GROUPS = ("project", "model", "tag")


@dataclass(frozen=True, slots=True)
class RunsQuery:
    """A visitor's filter, order and page of the list; empty: no restriction. A leading "-" reverses `sort`."""

    search: Text = ""
    project: Text = ""
    model: Text = ""
    tag: Text = ""
    state: Text = ""
    verdict: Text = ""
    sort: Text = ""
    group: Text = ""
    page: Annotated[int, Query(ge=1, le=100_000)] = 1

    @property
    def is_filtered(self) -> bool:
        return any((self.search.strip(), self.project, self.model, self.tag, self.state, self.verdict))

    def address(self, **changes: str | int) -> str:
        """Return the address of the list with these changes, on its first page unless `changes` names a page."""
        asked = {**asdict(self), "page": 1, **changes}
        given = {name: value for name, value in asked.items() if value and (name, value) != ("page", 1)}
        return f"/?{urlencode(given)}" if given else "/"

    def matches(self, run: Run, verdict: str) -> bool:
        return (
            self.search.strip().casefold() in f"{run.name or ''}\n{run.key}".casefold()
            and self.project in ("", run.project)
            and self.model in ("", run.model)
            and (not self.tag or self.tag in run.tags)
            and self.state in ("", run.state)
            and self.verdict in ("", verdict)
        )

    def group_of(self, run: Run) -> str:
        if self.group == "tag":
            return run.tags[0] if run.tags else "no tag"
        return str(getattr(run, self.group) or "not declared") if self.group in GROUPS else ""


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
    return {run_id: states[run_id].scale(step + 1) for run_id, step in observed.items() if run_id in states}


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
            "active_at": _active_at(run),
            "newest": {name: curve.newest for name, curve in curves.get(run.id, {}).items()},
            "paths": {name: of_runs[run.id] for name, of_runs in paths.items() if run.id in of_runs},
            "scale": scales.get(run.id),
            "incomplete": incomplete.get(run.id, 0),
            "group": groups[at],
            "is_first_of_group": bool(query.group) and (at == 0 or groups[at] != groups[at - 1]),
        }
        for at, (run, record) in enumerate(zip(runs, run_records(viewing.session, runs), strict=True))
    ]
