"""Queries on attributions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from service.platform.database.dialect import upsert
from service.platform.database.tables import Attempt, Run
from service.platform.database.tables.probes import Attribution
from service.runs.attempts.active_attempts import is_active
from service.runs.step_key import StepKey

KEY = ("run_id", "attempt", "step")


def document_of(session: Session, run_id: str, attempt: int, step: int) -> dict[str, Any] | None:
    """What was computed of the step."""
    found = session.get(Attribution, (run_id, attempt, step))
    return None if found is None else found.document


def is_stale(session: Session, run_id: str, attempt: int, step: int) -> bool:
    """Whether scores arrived since it was computed."""
    found = session.get(Attribution, (run_id, attempt, step))
    return found is not None and found.stale


def mark_stale(session: Session, run_id: str, attempt: int, step: int, now_us: int) -> None:
    """Scores arrived: what was computed of the step is out of date."""
    row = {"run_id": run_id, "attempt": attempt, "step": step, "stale": True, "changed_at_us": now_us}
    upsert(session, Attribution, [row], KEY)


def newest_steps(session: Session, run_id: str, attempts: Sequence[Attempt], limit: int) -> Sequence[int]:
    """Up to `limit` active steps that have replayed scores, the newest first."""
    chosen = is_active(attempts, Attribution.attempt, Attribution.step)
    query = select(Attribution.step).where(Attribution.run_id == run_id, chosen)
    return session.scalars(query.order_by(Attribution.step.desc()).limit(limit)).all()


def put(session: Session, run_id: str, attempt: int, step: int, document: dict[str, Any] | None, now_us: int) -> None:
    """Store what was computed of the step."""
    row = {
        "run_id": run_id,
        "attempt": attempt,
        "step": step,
        "stale": False,
        "changed_at_us": now_us,
        "document": document,
        "computed_at_us": now_us,
    }
    upsert(session, Attribution, [row], KEY)


def left_stale(session: Session, before_us: int, limit: int) -> list[StepKey]:
    """Return the steps that became out of date before a time and were not computed since."""
    query = (
        select(Attribution.run_id, Attribution.attempt, Attribution.step)
        .join(Run, Run.id == Attribution.run_id)
        .where(Attribution.stale, Attribution.changed_at_us < before_us, Run.deleted_at_us.is_(None))
        .order_by(Attribution.changed_at_us)
        .limit(limit)
    )
    return [StepKey(*row) for row in session.execute(query)]
