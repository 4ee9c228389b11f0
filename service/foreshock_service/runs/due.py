"""Marks of runs that must be advanced: each change of what a run's results come from adds one, in its transaction.

`watch/advance.py` reads the marks of a run, works out the results anew, and removes exactly the marks that it has read.
So a change during the work, or a crash, leaves a mark for the next time.
"""

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from sqlalchemy import delete, func, select
from sqlalchemy.orm import Session

from foreshock.api.runs import FindingSource
from foreshock_service.platform.database.engine import insert_rows
from foreshock_service.platform.database.session import after_commit
from foreshock_service.platform.database.tables import DueMark, new_identifier

WAKE = "foreshock.due"
"""Key of `session.info` under which sessions have the function that wakes the service's worker."""

_REMOVED_AT_ONCE = 1_000
"""SQLite allows 32,766 parameters of a statement."""


class Mark(NamedTuple):
    """A mark as it is stored (`DueMark`)."""

    id: str
    from_step: int | None
    source: FindingSource | None
    judged_until: int


def mark(
    session: Session,
    run_id: str,
    from_step: int | None = None,
    *,
    source: FindingSource | None = None,
    judged_until: int = -1,
) -> None:
    """Mark that a run must be advanced, and wake the worker after the commit.

    Always the run is diagnosed. The detectors judge it again from `from_step` on, and the findings of `source` are read
    again. Nobody is told of what is found in the steps up to `judged_until`.
    """
    row = {"id": new_identifier("mark"), "run_id": run_id, "from_step": from_step, "source": source}
    insert_rows(session, DueMark, [row | {"judged_until": judged_until}])
    wake: Callable[[], object] | None = session.info.get(WAKE)
    if wake is not None:
        after_commit(session, wake)


def due_runs(session: Session) -> Sequence[str]:
    """Return the runs that must be advanced, that with the oldest mark first."""
    query = select(DueMark.run_id).group_by(DueMark.run_id).order_by(func.min(DueMark.id))
    return session.scalars(query).all()


def due_among(session: Session, run_ids: Collection[str]) -> set[str]:
    """Return those of these runs that must be advanced."""
    return set(session.scalars(select(DueMark.run_id).where(DueMark.run_id.in_(run_ids)).distinct()))


def marks_of(session: Session, run_id: str) -> list[Mark]:
    """Return the marks of a run, the oldest first."""
    query = select(*(getattr(DueMark, name) for name in Mark._fields)).where(DueMark.run_id == run_id)
    return [Mark(*row) for row in session.execute(query.order_by(DueMark.id))]


def changes_up_to(session: Session, run_id: str, step: int) -> set[str]:
    """Return the ids of the marks that ask to judge this step or an earlier one."""
    return set(session.scalars(select(DueMark.id).where(DueMark.run_id == run_id, DueMark.from_step <= step)))


def is_source_due(session: Session, run_id: str, source: FindingSource) -> bool:
    """Return whether the findings of a run's source will be read again."""
    query = select(DueMark.id).where(DueMark.run_id == run_id, DueMark.source == source)
    return session.scalar(query.limit(1)) is not None


def remove(session: Session, marks: Collection[str]) -> None:
    """Remove the marks with these ids, whose work is done."""
    ids = list(marks)
    for start in range(0, len(ids), _REMOVED_AT_ONCE):
        session.execute(delete(DueMark).where(DueMark.id.in_(ids[start : start + _REMOVED_AT_ONCE])))
