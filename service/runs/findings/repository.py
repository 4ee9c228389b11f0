"""Queries on findings, and on those that must be read anew."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple, cast

from sqlalchemy import ColumnElement, CursorResult, case, delete, select, tuple_, update
from sqlalchemy.orm import Session

from foreshock.api.runs import FindingSource
from foreshock.severity import SEVERITIES, severity_rank
from foreshock_service.platform.database.engine import insert_for, table_of, upsert
from foreshock_service.platform.database.tables import DueFindings, Run, StoredFinding
from foreshock_service.runs.findings.schemas import FindingFilter

_KEY = ("run_id", "source", "name")
_due = table_of(DueFindings)
_ORDER = (StoredFinding.changed_at_us, StoredFinding.run_id, StoredFinding.source, StoredFinding.name)

CursorOfFindings = tuple[int, str, str, str]


class Due(NamedTuple):
    """Findings of a run's source that must be read anew, as of a number of changes."""

    run_id: str
    source: FindingSource
    changes: int


def newest_first(
    session: Session, chosen: FindingFilter, after: CursorOfFindings | None, limit: int
) -> Sequence[tuple[StoredFinding, str, str]]:
    """Return up to `limit` findings of runs that are not deleted, each with its run's key and project.

    They come by falling (changed_at_us, run, source, name), before `after`.
    """
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
    if after is not None:
        query = query.where(tuple_(*_ORDER) < after)
    found = session.execute(query.order_by(*(column.desc() for column in _ORDER)).limit(limit))
    return [(finding, key, project) for finding, key, project in found]


def of_source(session: Session, run_id: str, source: FindingSource) -> dict[str, StoredFinding]:
    """Return the findings of a run's source by name."""
    query = select(StoredFinding).where(StoredFinding.run_id == run_id, StoredFinding.source == source)
    return {found.name: found for found in session.scalars(query)}


def sources_with_steps_from(session: Session, run_id: str, step: int) -> Sequence[FindingSource]:
    """Return the sources whose findings of the run include this step or a later one."""
    query = select(StoredFinding.source).where(StoredFinding.run_id == run_id, StoredFinding.newest_step >= step)
    return cast("Sequence[FindingSource]", session.scalars(query.distinct()).all())


def add_step(session: Session, rows: Sequence[dict[str, Any]]) -> None:
    """Add findings of one step to those of its run. `steps` is 1; 0 if the step is counted already."""
    if not rows:
        return
    table = table_of(StoredFinding)
    statement = insert_for(session, table)
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
    session.execute(statement.on_conflict_do_update(index_elements=_KEY, set_=changed), list(rows))


def _rank(severity: ColumnElement[str]) -> ColumnElement[int]:
    return case({each: severity_rank(each) for each in SEVERITIES}, value=severity)


def put(session: Session, rows: Sequence[dict[str, Any]]) -> None:
    """Store findings, or overwrite those of the same names."""
    upsert(session, StoredFinding, rows, _KEY)


def remove(session: Session, run_id: str, source: FindingSource, names: Collection[str]) -> None:
    """Delete findings of a run's source."""
    if names:
        session.execute(
            delete(StoredFinding).where(
                StoredFinding.run_id == run_id, StoredFinding.source == source, StoredFinding.name.in_(names)
            )
        )


def mark_due(session: Session, run_id: str, source: FindingSource) -> None:
    """Mark the findings of a run's source as to be read anew, and count the change."""
    statement = insert_for(session, _due)
    again = statement.on_conflict_do_update(
        index_elements=("run_id", "source"), set_={"changes": _due.c.changes + statement.excluded.changes}
    )
    session.execute(again, {"run_id": run_id, "source": source, "changes": 1})


def count_change(session: Session, run_id: str, source: FindingSource) -> None:
    """Count a change of the steps, if findings of the run's source are to be read anew."""
    statement = update(_due).where(_due.c.run_id == run_id, _due.c.source == source)
    session.execute(statement.values(changes=_due.c.changes + 1))


def due(session: Session, limit: int) -> list[Due]:
    """Return up to `limit` sources of runs that are not deleted whose findings are to be read anew."""
    query = (
        select(DueFindings.run_id, DueFindings.source, DueFindings.changes)
        .join(Run, Run.id == DueFindings.run_id)
        .where(Run.deleted_at_us.is_(None))
        .order_by(DueFindings.run_id, DueFindings.source)
        .limit(limit)
    )
    return [Due(run_id, cast(FindingSource, source), changes) for run_id, source, changes in session.execute(query)]


def settle(session: Session, read: Due) -> bool:
    """Remove the mark and return True; False if the steps have changed since."""
    statement = delete(DueFindings).filter_by(**read._asdict())
    return cast("CursorResult[Any]", session.execute(statement)).rowcount > 0
