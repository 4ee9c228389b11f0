"""Findings of runs: what the service has concluded from their stored data, by run, source and name.

A source may add the findings of a new step in the transaction that stores them, so that a longer run takes no longer.
What else may change them (a late shard, a resume) marks the run's source as due, and its findings are read again when
the run is advanced.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, cast

from fastapi import Query
from sqlalchemy import ColumnElement, delete, select
from sqlalchemy.orm import Session

from foreshock.api.records import from_attributes, to_json
from foreshock.api.runs import ConfidenceRecord, FindingRecord, FindingSource
from foreshock.clock import now_us
from foreshock.severity import Severity, severity_rank
from foreshock_service.platform import pagination, parameters, security
from foreshock_service.platform.context import Context
from foreshock_service.platform.database.engine import upsert
from foreshock_service.platform.database.tables import Run, StoredFinding
from foreshock_service.runs import attempts, due, events, runs

router = parameters.api_router(prefix="/v1", tags=["findings"])

_Several = Query(max_length=20, description="absent: all")
_KEY = ("run_id", "source", "name")
_CHANGES = ("severity", "steps", "first_step", "newest_step")
_ORDER = (StoredFinding.changed_at_us, StoredFinding.run_id, StoredFinding.source, StoredFinding.name)


@dataclass(frozen=True, slots=True)
class Finding:
    """A finding over the active steps of a run: the content of its newest step, with the worst severity."""

    name: str
    severity: Severity
    title: str
    sentence: str
    remedy: str | None = None
    confidence: ConfidenceRecord | None = None
    steps: int = 1
    first_step: int = 0
    newest_step: int = 0


Read = Callable[[Session, str], Sequence[Finding]]
"""A function that reads the findings of a run from a source."""


@router.get("/runs/{run}/findings")
def list_findings(
    asked: runs.RunToRead,
    source: Annotated[list[FindingSource] | None, _Several] = None,
    severity: Annotated[list[Severity] | None, _Several] = None,
    cursor: pagination.Cursor = None,
    limit: pagination.Limit = pagination.DEFAULT_LIMIT,
) -> pagination.Page[FindingRecord]:
    """Return what is concluded from the run's stored data: causes of mismatch and warnings of the lint.

    The last changed comes first. They are up to date within seconds.
    """
    with asked.reading() as session:
        chosen = pagination.among((StoredFinding.source, source), (StoredFinding.severity, severity))
        return _page(session, [StoredFinding.run_id == asked.run, *chosen], cursor, limit)


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
    table = StoredFinding
    chosen = pagination.among((table.source, source), (table.severity, severity), (table.name, name))
    with context.database.read() as session:
        return _page(session, [*(Run.project == each for each in principal.projects(project)), *chosen], cursor, limit)


def _page(
    session: Session, chosen: Sequence[ColumnElement[bool]], cursor: str | None, limit: int
) -> pagination.Page[FindingRecord]:
    query = select(StoredFinding, Run.key, Run.project).join(Run, Run.id == StoredFinding.run_id)

    def read(rows: Sequence[Any]) -> list[FindingRecord]:
        return [from_attributes(FindingRecord, row, run=row.run_id, run_key=key, project=of) for row, key, of in rows]

    query = query.where(Run.deleted_at_us.is_(None), *chosen)
    return pagination.page_of_query(session, query, _ORDER, cursor, limit, read)


def forget_superseded(session: Session, started: events.AttemptStarted) -> None:
    """Mark the findings as due that include steps which the new attempt supersedes."""
    query = select(StoredFinding.source).where(
        StoredFinding.run_id == started.run_id, StoredFinding.newest_step >= started.resume_step
    )
    for source in session.scalars(query.distinct()).all():
        due.mark(session, started.run_id, source=cast(FindingSource, source))


def replace_findings(session: Session, run_id: str, source: FindingSource, found: Sequence[Finding]) -> None:
    """Replace the findings of a run's source; those of the same steps and severity keep their time of change."""
    of_source = (StoredFinding.run_id == run_id, StoredFinding.source == source)
    known = {each.name: each for each in session.scalars(select(StoredFinding).where(*of_source))}
    gone = known.keys() - {each.name for each in found}
    if gone:
        session.execute(delete(StoredFinding).where(*of_source, StoredFinding.name.in_(gone)))
    _store(session, run_id, source, found, known)


def add_step(session: Session, key: events.StepKey, source: FindingSource, found: Sequence[Finding]) -> None:
    """Add the findings of a step that had none to those of its run. The run is locked."""
    if not attempts.is_active(session, key):
        return
    if due.is_source_due(session, key.run_id, source):
        # What is read at this moment may lack this step.
        due.mark(session, key.run_id, source=source)
        return
    of_source = (StoredFinding.run_id == key.run_id, StoredFinding.source == source)
    query = select(StoredFinding).where(*of_source, StoredFinding.name.in_([each.name for each in found]))
    known = {each.name: each for each in session.scalars(query)}
    before = {name: from_attributes(Finding, each) for name, each in known.items()}
    _store(session, key.run_id, source, [_merged(each, before.get(each.name)) for each in found], known)


def _store(
    session: Session, run_id: str, source: FindingSource, found: Sequence[Finding], known: Mapping[str, StoredFinding]
) -> None:
    rows = []
    for each in found:
        stored = known.get(each.name)
        is_same = stored is not None and all(getattr(stored, name) == getattr(each, name) for name in _CHANGES)
        at_us = stored.changed_at_us if stored is not None and is_same else now_us()
        rows.append({"run_id": run_id, "source": source, **to_json(each), "changed_at_us": at_us})
    upsert(session, StoredFinding, rows, _KEY)


def _merged(finding: Finding, other: Finding | None) -> Finding:
    """Return a finding over the steps of both, with the content of the newest one."""
    if other is None:
        return finding
    newest = max(other, finding, key=lambda each: each.newest_step)
    severity = min(other.severity, finding.severity, key=severity_rank)
    first = min(other.first_step, finding.first_step)
    return replace(newest, severity=severity, steps=other.steps + finding.steps, first_step=first)


def newest_of_steps(found: Iterable[tuple[int, Iterable[Finding]]]) -> list[Finding]:
    """Return each finding of these steps, which are given newest first, with the content of its newest step."""
    newest: dict[str, Finding] = {}
    for step, of_step in found:
        for each in of_step:
            at_step = replace(each, first_step=step, newest_step=step)
            newest[each.name] = _merged(at_step, newest.get(each.name))
    return list(newest.values())
