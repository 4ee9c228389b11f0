"""Queries on setups and announced changes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from sqlalchemy import bindparam, func, select
from sqlalchemy.orm import Session

from foreshock_service.platform.database.engine import insert_if_absent, insert_rows, table_of, upsert
from foreshock_service.platform.database.tables import AnnouncedChange, RunSetup, Step
from foreshock_service.runs.attempts.active_attempts import ActiveRange, AttemptStart, is_active
from foreshock_service.runs.changes.setups import StoredSetup

_steps = table_of(Step).c
_NAMED = (
    _steps.run_id == bindparam("run_id"),
    _steps.attempt == bindparam("attempt"),
    _steps.step >= bindparam("first"),
    _steps.step < bindparam("end"),
    _steps.closed_at_us.is_not(None),
    _steps.setups.is_not(None),
)
_WITH_PREVIOUS = (
    select(_steps.step, _steps.setups, func.lag(_steps.setups).over(order_by=_steps.step).label("previous"))
    .where(*_NAMED)
    .subquery()
)
_CHANGED = select(_WITH_PREVIOUS.c.step, _WITH_PREVIOUS.c.previous, _WITH_PREVIOUS.c.setups).where(
    _WITH_PREVIOUS.c.setups != _WITH_PREVIOUS.c.previous, _WITH_PREVIOUS.c.step >= bindparam("from_step")
)
_OLDEST_CHANGED = _CHANGED.order_by(_WITH_PREVIOUS.c.step).limit(bindparam("limit"))
_NEWEST_CHANGED = _CHANGED.order_by(_WITH_PREVIOUS.c.step.desc()).limit(bindparam("limit"))
_FIRST_NAMED = select(_steps.step, _steps.setups).where(*_NAMED).order_by(_steps.step).limit(1)
_LAST_NAMED = select(_steps.setups).where(*_NAMED).order_by(_steps.step.desc()).limit(1)

_KEY = ("run_id", "attempt", "step", "kind")


class Chosen(NamedTuple):
    """Up to `limit` changes from `from_step` on: the oldest, or the newest of them."""

    limit: int
    from_step: int = 0
    newest: bool = False


class SetupChange(NamedTuple):
    """A closed step whose shards name other setups than those of the step before it, each by its numbers."""

    step: int
    before: str
    after: str


def number_of(session: Session, run_id: str, digest: str) -> int | None:
    """Return the number of a setup of the run; None if no shard has named it."""
    return session.scalar(select(RunSetup.number).where(RunSetup.run_id == run_id, RunSetup.digest == digest))


def newest_number(session: Session, run_id: str) -> int:
    """Return the number of the run's newest setup; 0 if it has none."""
    return session.scalar(select(func.max(RunSetup.number)).where(RunSetup.run_id == run_id)) or 0


def add_setup(session: Session, run_id: str, number: int, setup: StoredSetup) -> None:
    """Add a setup to the run, which is locked."""
    row = {"run_id": run_id, "number": number, "digest": setup.digest, "setup": setup.text}
    insert_rows(session, RunSetup, [row])


def setups_of_run(session: Session, run_id: str) -> dict[int, str]:
    """Return the setups of a run as JSON, by number."""
    query = select(RunSetup.number, RunSetup.setup).where(RunSetup.run_id == run_id)
    return {row.number: row.setup for row in session.execute(query)}


def changes_within(session: Session, run_id: str, active: ActiveRange, chosen: Chosen) -> list[SetupChange]:
    """Return the chosen changes between closed steps of one range."""
    parameters = {"run_id": run_id, **active.parameters(), "from_step": chosen.from_step, "limit": chosen.limit}
    statement = _NEWEST_CHANGED if chosen.newest else _OLDEST_CHANGED
    return [SetupChange(*row) for row in session.execute(statement, parameters)]


def first_named(session: Session, run_id: str, active: ActiveRange) -> tuple[int, str] | None:
    """Return the first closed step of a range that names setups, and their numbers."""
    row = session.execute(_FIRST_NAMED, {"run_id": run_id, **active.parameters()}).first()
    return None if row is None else (row[0], row[1])


def last_named(session: Session, run_id: str, active: ActiveRange) -> str | None:
    """Return the setups of the last closed step of a range that names some."""
    return session.scalar(_LAST_NAMED, {"run_id": run_id, **active.parameters()})


def put(session: Session, row: dict[str, Any]) -> bool:
    """Insert or overwrite an announced change; return True if it is new."""
    if insert_if_absent(session, AnnouncedChange, row):
        return True
    upsert(session, AnnouncedChange, [row], _KEY)
    return False


def announced(
    session: Session, run_id: str, attempts: Sequence[AttemptStart], chosen: Chosen
) -> Sequence[AnnouncedChange]:
    """Return the chosen announced changes at active steps."""
    table = AnnouncedChange
    active = is_active(attempts, table.attempt, table.step, first=chosen.from_step)
    order = (table.step.desc(), table.kind.desc()) if chosen.newest else (table.step, table.kind)
    query = select(table).where(table.run_id == run_id, active).order_by(*order).limit(chosen.limit)
    return session.scalars(query).all()


def announced_steps(session: Session, run_id: str) -> list[tuple[int, int]]:
    """Return (step, attempt) of every announced change, those of superseded steps included."""
    query = select(AnnouncedChange.step, AnnouncedChange.attempt).where(AnnouncedChange.run_id == run_id)
    return [(step, attempt) for step, attempt in session.execute(query.distinct())]
