"""Findings of runs: kept up to date by their sources when steps change, and listed.

A source adds the findings of a new step in the transaction that stores them. Whatever takes findings away (a late
shard, a measurement made again, a resume) marks the run's source as due, and a background job reads it anew outside the
writer, and stores it if no step changed meanwhile.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

from sqlalchemy.orm import Session

from foreshock.api.records import from_attributes, to_json
from foreshock.api.runs import FindingRecord, FindingSource
from foreshock.clock import now_us
from foreshock.severity import Severity, severity_rank
from foreshock_service.platform import parameters, security
from foreshock_service.platform.context import ServiceContext
from foreshock_service.platform.database.tables import StoredFinding
from foreshock_service.runs import active_steps, attempts, runs
from foreshock_service.runs.events import AttemptStarted, FindingsChanged, StepKey
from foreshock_service.runs.findings import repository
from foreshock_service.runs.findings.repository import CursorOfFindings, Due
from foreshock_service.runs.findings.schemas import FindingFilter, FindingOfStep, FindingOfSteps


def list_findings(
    session: Session, principal: security.Principal, run_id: str, chosen: FindingFilter, cursor: str | None, limit: int
) -> parameters.Page[FindingRecord]:
    """Return one page of a run's findings, the last changed first. Raises RunNotFound, RunDeleted."""
    runs.get_run(session, principal, run_id)
    return list_findings_of_runs(session, chosen._replace(run_id=run_id), cursor, limit)


def list_findings_of_runs(
    session: Session, chosen: FindingFilter, cursor: str | None, limit: int
) -> parameters.Page[FindingRecord]:
    """Return one page of the findings of all chosen runs, the last changed first. Raises InvalidCursor."""
    shape = (int, str, str, str)
    after = cast(CursorOfFindings, parameters.decode_cursor(cursor, shape)) if cursor is not None else None
    rows = repository.newest_first(session, chosen, after, limit + 1)
    found = [_read(row, key, project) for row, key, project in rows]
    return parameters.page_of(found, limit, lambda each: (each.changed_at_us, each.run, each.source, each.name))


def add_step(
    session: Session, key: StepKey, source: FindingSource, before: Mapping[str, str], found: Sequence[FindingOfStep]
) -> None:
    """Add the findings of a step to those of its run, which the caller has locked.

    `before` has the severities of the findings that the step had, by name. If one is gone or has another severity, the
    run's findings are read anew later.
    """
    if active_steps.active_attempt_of(attempts.attempts_of_run(session, key.run_id), key.step) != key.attempt:
        return
    now = {each.name: each.severity for each in found}
    if any(now.get(name) != severity for name, severity in before.items()):
        repository.mark_due(session, key.run_id, source)
        return
    if found:
        rows = [
            _row(key.run_id, source, FindingOfSteps(each, int(each.name not in before), key.step, key.step))
            for each in found
        ]
        repository.add_step(session, rows)
        repository.count_change(session, key.run_id, source)


def mark_due(session: Session, run_id: str, source: FindingSource) -> None:
    """Mark the findings of a run's source as to be read anew by the background job."""
    repository.mark_due(session, run_id, source)


def forget_superseded(session: Session, started: AttemptStarted) -> None:
    """Have the findings read anew that include steps which the new attempt supersedes."""
    for source in repository.sources_with_steps_from(session, started.run_id, started.resume_step):
        repository.mark_due(session, started.run_id, source)


def replace_findings(session: Session, run_id: str, source: FindingSource, found: Sequence[FindingOfSteps]) -> None:
    """Store the findings of a run's source instead of those that it has; unchanged ones keep their time."""
    known = repository.of_source(session, run_id, source)
    rows = [_row(run_id, source, each) for each in found]
    repository.remove(session, run_id, source, known.keys() - {row["name"] for row in rows})
    changed = [row for row in rows if not _is_stored(row, known.get(row["name"]))]
    repository.put(session, changed)


def of_steps(steps: Sequence[int], severities: Sequence[str], newest: FindingOfStep) -> FindingOfSteps:
    """Return a finding over the steps that have it, in order, with the worst of their severities."""
    worst = cast(Severity, min(severities, key=severity_rank))
    return FindingOfSteps(replace(newest, severity=worst), len(steps), steps[0], steps[-1])


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


def _is_stored(row: dict[str, Any], stored: StoredFinding | None) -> bool:
    return stored is not None and all(
        getattr(stored, name) == value for name, value in row.items() if name != "changed_at_us"
    )


def _read(row: StoredFinding, run_key: str, project: str) -> FindingRecord:
    return from_attributes(FindingRecord, row, run=row.run_id, run_key=run_key, project=project)


Sources = Mapping[FindingSource, Callable[[Session, str], Sequence[FindingOfSteps]]]
"""What reads the findings of a run, by source. `service/app.py` names them: some are above this part."""

_AT_ONCE = 100
_logger = logging.getLogger(__name__)


def rebuild_due_findings(context: ServiceContext, sources: Sources) -> int:
    """Read the findings anew that are due, and return the number of runs × sources that are done. For the sweeper."""
    with context.database.read() as session:
        due = repository.due(session, _AT_ONCE)
    return sum(_try_to_rebuild(context, sources, each) for each in due)


def _try_to_rebuild(context: ServiceContext, sources: Sources, due: Due) -> bool:
    """Rebuild one source of a run; False if its steps changed meanwhile, or after an error, which is logged."""
    try:
        with context.database.read() as session:
            found = sources[due.source](session, due.run_id)
        return context.database.write(partial(_store, context, due, found))
    except Exception:
        _logger.exception("the findings of run %s (%s) could not be read; they are retried", due.run_id, due.source)
        return False


def _store(context: ServiceContext, due: Due, found: Sequence[FindingOfSteps], session: Session) -> bool:
    if runs.lock_run_for_background(session, due.run_id) is None or not repository.settle(session, due):
        return False
    replace_findings(session, due.run_id, due.source, found)
    context.events.publish(session, FindingsChanged(due.run_id))
    return True
