"""Findings of runs: what the service has concluded from their stored data, by run, source and name.

A source adds the findings of a new step in the transaction that stores them. What may remove findings (a late shard, a
repeated measurement, a resume) marks the run's source as due, and its findings are read again when the run is advanced.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Annotated, Any, NamedTuple, cast

from fastapi import Query
from sqlalchemy import ColumnElement, case, delete, select
from sqlalchemy.orm import Session

from foreshock.api.records import from_attributes, to_json
from foreshock.api.runs import ConfidenceRecord, FindingRecord, FindingSource
from foreshock.clock import now_us
from foreshock.severity import SEVERITIES, Severity, severity_rank
from foreshock_service.platform import pagination, parameters, security
from foreshock_service.platform.context import Context
from foreshock_service.platform.database.engine import insert_for, table_of, upsert
from foreshock_service.platform.database.tables import Run, StoredFinding
from foreshock_service.runs import attempts, due, events, run_endpoints, runs

router = parameters.api_router(prefix="/v1", tags=["findings"])

_Several = Query(max_length=20, description="absent: all")
_KEY = ("run_id", "source", "name")
_ORDER = (StoredFinding.changed_at_us, StoredFinding.run_id, StoredFinding.source, StoredFinding.name)


Read = Callable[[Session, str], Sequence["FindingOfSteps"]]
"""A function that reads the findings of a run from a source."""


class FindingFilter(NamedTuple):
    """Selects findings; an empty field restricts nothing. A run's project must equal all of `projects`."""

    projects: tuple[str, ...] = ()
    run_id: str | None = None
    sources: tuple[FindingSource, ...] = ()
    severities: tuple[Severity, ...] = ()
    names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class FindingOfStep:
    """A finding at one step."""

    name: str
    severity: Severity
    title: str
    sentence: str
    remedy: str | None = None
    confidence: ConfidenceRecord | None = None


@dataclass(frozen=True, slots=True)
class FindingOfSteps:
    """A finding over the active steps of a run; `newest` is that of its newest step, with the worst severity."""

    newest: FindingOfStep
    steps: int
    first_step: int
    newest_step: int


@router.get("/runs/{run}/findings")
def list_findings(
    run: run_endpoints.RunIdentifier,
    context: Context,
    principal: security.Reader,
    source: Annotated[list[FindingSource] | None, _Several] = None,
    severity: Annotated[list[Severity] | None, _Several] = None,
    cursor: pagination.Cursor = None,
    limit: pagination.Limit = pagination.DEFAULT_LIMIT,
) -> pagination.Page[FindingRecord]:
    """Return what is concluded from the run's stored data: causes of mismatch and warnings of the lint.

    The last changed comes first. Attributed causes, and findings that late data or a resume takes away, are up to date
    within seconds.
    """
    chosen = FindingFilter(run_id=run, sources=tuple(source or ()), severities=tuple(severity or ()))
    with context.database.read() as session:
        runs.get_run(session, principal, run)
        return findings_of_runs(session, chosen, cursor, limit)


@router.get("/findings")
def list_findings_of_runs(
    context: Context,
    principal: security.Reader,
    project: Annotated[parameters.Name | None, Query()] = None,
    source: Annotated[list[FindingSource] | None, _Several] = None,
    severity: Annotated[list[Severity] | None, _Several] = None,
    name: Annotated[list[parameters.Name] | None, _Several] = None,
    cursor: pagination.Cursor = None,
    limit: pagination.Limit = pagination.DEFAULT_LIMIT,
) -> pagination.Page[FindingRecord]:
    """Return the findings of all runs that the key may see, the last changed first."""
    chosen = FindingFilter(
        projects=principal.projects(project),
        sources=tuple(source or ()),
        severities=tuple(severity or ()),
        names=tuple(name or ()),
    )
    with context.database.read() as session:
        return findings_of_runs(session, chosen, cursor, limit)


def findings_of_runs(
    session: Session, chosen: FindingFilter, cursor: str | None, limit: int
) -> pagination.Page[FindingRecord]:
    """Return one page of the chosen findings of runs that are not deleted, the last changed first."""
    query = (
        select(StoredFinding, Run.key, Run.project)
        .join(Run, Run.id == StoredFinding.run_id)
        .where(Run.deleted_at_us.is_(None), *(Run.project == project for project in chosen.projects))
    )
    if chosen.run_id is not None:
        query = query.where(StoredFinding.run_id == chosen.run_id)
    for column, values in (
        (StoredFinding.source, chosen.sources),
        (StoredFinding.severity, chosen.severities),
        (StoredFinding.name, chosen.names),
    ):
        if values:
            query = query.where(column.in_(values))

    def read(rows: Sequence[Any]) -> list[FindingRecord]:
        return [from_attributes(FindingRecord, row, run=row.run_id, run_key=key, project=of) for row, key, of in rows]

    return pagination.page_of_query(session, query, _ORDER, cursor, limit, read)


def add_step(
    session: Session,
    key: events.StepKey,
    source: FindingSource,
    before: Mapping[str, str],
    found: Sequence[FindingOfStep],
) -> None:
    """Add the findings of a step to those of its run, which the caller has locked.

    `before` has the severities of the step's previous findings, by name. If one of these is gone or has another
    severity, or if the run's findings will be read again anyway, they are read again with this step's.
    """
    if not attempts.is_active(session, key):
        return
    now = {each.name: each.severity for each in found}
    changed = any(now.get(name) != severity for name, severity in before.items())
    if changed or (found and due.is_source_due(session, key.run_id, source)):
        due.mark(session, key.run_id, source=source)
        return
    if not found:
        return
    # `steps` is 0 if the step is counted already.
    rows = [
        _row(key.run_id, source, FindingOfSteps(each, int(each.name not in before), key.step, key.step))
        for each in found
    ]
    session.execute(_adding(insert_for(session, table_of(StoredFinding))), rows)


# Cached: the statement takes longer to build than to execute.
@cache
def _adding(statement: Any) -> Any:
    table = table_of(StoredFinding)
    added = statement.excluded
    is_newest = added.newest_step >= table.c.newest_step
    is_worse = _rank(added.severity) < _rank(table.c.severity)
    changed = {
        "severity": case((is_worse, added.severity), else_=table.c.severity),
        "sentence": case((is_newest, added.sentence), else_=table.c.sentence),
        "confidence": case((is_newest, added.confidence), else_=table.c.confidence),
        "title": added.title,
        "remedy": added.remedy,
        "steps": table.c.steps + added.steps,
        "first_step": case((added.first_step < table.c.first_step, added.first_step), else_=table.c.first_step),
        "newest_step": case((is_newest, added.newest_step), else_=table.c.newest_step),
        "changed_at_us": case((added.steps > 0, added.changed_at_us), else_=table.c.changed_at_us),
    }
    return statement.on_conflict_do_update(index_elements=_KEY, set_=changed)


def _rank(severity: ColumnElement[str]) -> ColumnElement[int]:
    return case({each: severity_rank(each) for each in SEVERITIES}, value=severity)


def forget_superseded(session: Session, started: events.AttemptStarted) -> None:
    """Mark the findings as due that include steps which the new attempt supersedes."""
    query = select(StoredFinding.source).where(
        StoredFinding.run_id == started.run_id, StoredFinding.newest_step >= started.resume_step
    )
    for source in session.scalars(query.distinct()).all():
        due.mark(session, started.run_id, source=cast(FindingSource, source))


def replace_findings(session: Session, run_id: str, source: FindingSource, found: Sequence[FindingOfSteps]) -> None:
    """Replace the findings of a run's source; unchanged ones keep their time of change."""
    of_source = (StoredFinding.run_id == run_id, StoredFinding.source == source)
    known = {each.name: each for each in session.scalars(select(StoredFinding).where(*of_source))}
    rows = [_row(run_id, source, each) for each in found]
    gone = known.keys() - {row["name"] for row in rows}
    if gone:
        session.execute(delete(StoredFinding).where(*of_source, StoredFinding.name.in_(gone)))
    changed = [
        row
        for row in rows
        if (stored := known.get(row["name"])) is None
        or any(getattr(stored, name) != value for name, value in row.items() if name != "changed_at_us")
    ]
    upsert(session, StoredFinding, changed, _KEY)


def of_steps(steps: Sequence[int], severities: Sequence[str], newest: FindingOfStep) -> FindingOfSteps:
    """Return a finding over the steps that have it, in order, with the worst of their severities."""
    worst = cast(Severity, min(severities, key=severity_rank))
    return FindingOfSteps(replace(newest, severity=worst), len(steps), steps[0], steps[-1])


def newest_of_steps(found: Iterable[tuple[int, Iterable[FindingOfStep]]]) -> list[FindingOfSteps]:
    """Return each finding of these steps, which are given newest first, with the content of its newest step."""
    newest: dict[str, FindingOfStep] = {}
    steps: defaultdict[str, list[int]] = defaultdict(list)
    for step, of_step in found:
        for each in of_step:
            newest.setdefault(each.name, each)
            steps[each.name].insert(0, step)
    return [of_steps(steps[name], [each.severity], each) for name, each in newest.items()]


def _row(run_id: str, source: FindingSource, found: FindingOfSteps) -> dict[str, Any]:
    newest = found.newest
    return {
        "run_id": run_id,
        "source": source,
        "name": newest.name,
        "severity": newest.severity,
        "title": newest.title,
        "sentence": newest.sentence,
        "remedy": newest.remedy,
        "steps": found.steps,
        "first_step": found.first_step,
        "newest_step": found.newest_step,
        "confidence": None if newest.confidence is None else to_json(newest.confidence),
        "changed_at_us": now_us(),
    }
