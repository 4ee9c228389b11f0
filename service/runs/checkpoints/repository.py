"""Queries on checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import select, tuple_
from sqlalchemy.orm import Session

from foreshock_service.platform.database.dialect import insert_if_absent, upsert
from foreshock_service.platform.database.tables import Checkpoint

_KEY = ("run_id", "attempt", "step")


def find(session: Session, run_id: str, attempt: int, step: int) -> Checkpoint | None:
    """Return the checkpoint of a step in an attempt."""
    return session.get(Checkpoint, (run_id, attempt, step))


def put(session: Session, row: dict[str, Any]) -> bool:
    """Insert or overwrite a checkpoint; return True if it is new."""
    if insert_if_absent(session, Checkpoint, row):
        return True
    upsert(session, Checkpoint, [row], _KEY)
    return False


def page_of_run(session: Session, run_id: str, after: tuple[int, int], limit: int) -> Sequence[Checkpoint]:
    """Return up to `limit` checkpoints beyond `after` (step, attempt), in order."""
    position = tuple_(Checkpoint.step, Checkpoint.attempt)
    query = select(Checkpoint).where(Checkpoint.run_id == run_id, position > after)
    return session.scalars(query.order_by(Checkpoint.step, Checkpoint.attempt).limit(limit)).all()
