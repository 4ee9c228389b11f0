"""Queries on the rollouts of steps that are stored in full."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import select
from sqlalchemy.orm import Session

from service.platform.database.tables import Step
from service.runs.attempts.active_attempts import AttemptStart, is_active
from service.runs.step_key import StepKey


def counts(session: Session, key: StepKey) -> tuple[int, int | None] | None:
    """Return the rollouts of a step, and those stored in full (None: all); None without such a step."""
    query = select(Step.rollouts, Step.full_rollouts).where(
        Step.run_id == key.run_id, Step.attempt == key.attempt, Step.step == key.step
    )
    row = session.execute(query).one_or_none()
    return None if row is None else (row[0], row[1])


def statistics_steps(session: Session, run_id: str, attempts: Sequence[AttemptStart], limit: int) -> Sequence[Step]:
    """Return up to `limit` active steps with only some rollouts stored in full, newest first; not the purged ones."""
    """Return up to `limit` active steps with only some rollouts stored in full, newest first; not the purged ones."""
    query = select(Step).where(
        Step.run_id == run_id,
        Step.full_rollouts.is_not(None),
        Step.tokens_purged_at_us.is_(None),
        is_active(attempts, Step.attempt, Step.step),
    )
    return session.scalars(query.order_by(Step.step.desc()).limit(limit)).all()
