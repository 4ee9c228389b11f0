"""Queries on steps."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import select
from sqlalchemy.orm import Session

from service.platform.database.tables import Attempt, Run, Step
from service.runs.attempts.active_attempts import is_active
from service.runs.step_key import StepKey


def find(session: Session, key: StepKey) -> Step | None:
    """Return the step; None if no shard of it was uploaded."""
    return session.get(Step, key)


def overdue(session: Session, before_us: int, limit: int) -> Sequence[Step]:
    """Open steps of living runs whose last shard came before a time."""
    query = (
        select(Step)
        .join(Run, Run.id == Step.run_id)
        .where(Step.closed_at_us.is_(None), Step.last_shard_at_us < before_us, Run.deleted_at_us.is_(None))
    )
    return session.scalars(query.order_by(Step.last_shard_at_us).limit(limit)).all()


def page_of_run(
    session: Session, run_id: str, attempts: Sequence[Attempt], attempt: int | None, after: int, limit: int
) -> Sequence[Step]:
    """Up to `limit` steps beyond `after`, in order: those of one attempt, or the active ones."""
    chosen = Step.attempt == attempt if attempt is not None else is_active(attempts, Step.attempt, Step.step)
    query = select(Step).where(Step.run_id == run_id, Step.step > after, chosen)
    return session.scalars(query.order_by(Step.step).limit(limit)).all()
