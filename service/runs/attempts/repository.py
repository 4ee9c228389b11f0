"""Queries on attempts."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from foreshock_service.platform.database.tables import Attempt, AttemptClient
from foreshock_service.runs.attempts.active_attempts import AttemptStart


def find(session: Session, run_id: str, attempt: int) -> Attempt | None:
    """Return the attempt with this number."""
    return session.scalar(select(Attempt).where(Attempt.run_id == run_id, Attempt.attempt == attempt))


def find_by_key(session: Session, run_id: str, key: str) -> Attempt | None:
    """Return the attempt with this client key."""
    return session.scalar(select(Attempt).where(Attempt.run_id == run_id, Attempt.key == key))


def of_run(session: Session, run_id: str) -> Sequence[Attempt]:
    """Return every attempt of a run, in order."""
    return session.scalars(select(Attempt).where(Attempt.run_id == run_id).order_by(Attempt.attempt)).all()


def page_of_run(session: Session, run_id: str, after: int, limit: int) -> Sequence[Attempt]:
    """Return up to `limit` attempts with numbers above `after`, in order."""
    query = select(Attempt).where(Attempt.run_id == run_id, Attempt.attempt > after)
    return session.scalars(query.order_by(Attempt.attempt).limit(limit)).all()


def starts_of_run(session: Session, run_id: str) -> list[AttemptStart]:
    """Return where every attempt of a run begins, in order."""
    query = select(Attempt.attempt, Attempt.resume_step).where(Attempt.run_id == run_id).order_by(Attempt.attempt)
    return [AttemptStart(*row) for row in session.execute(query)]


def fingerprints(session: Session, run_id: str, attempts: Collection[int]) -> dict[int, dict[str, Any]]:
    """Return the fingerprints of these attempts, by number."""
    query = select(Attempt.attempt, Attempt.fingerprint).where(Attempt.run_id == run_id, Attempt.attempt.in_(attempts))
    return {row.attempt: row.fingerprint for row in session.execute(query)}


def next_number(session: Session, run_id: str) -> int:
    """Return the number of the run's next attempt."""
    newest = session.scalar(select(func.max(Attempt.attempt)).where(Attempt.run_id == run_id))
    return 1 + (newest or 0)


def lost_by_clients(session: Session, run_id: str, attempt: int) -> int:
    """Return the number of items that the clients of an attempt rejected, dropped or could not encode."""
    table = AttemptClient
    lost = func.sum(table.rejected + table.dropped + table.invalid)
    return int(session.scalar(select(lost).where(table.run_id == run_id, table.attempt == attempt)) or 0)
