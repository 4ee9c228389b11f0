"""Queries on the rollouts of steps that are stored in full."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import bindparam, select
from sqlalchemy.orm import Session

from foreshock_service.platform.database.dialect import table_of
from foreshock_service.platform.database.prepared import Prepared
from foreshock_service.platform.database.tables import Step
from foreshock_service.runs.attempts.active_attempts import AttemptStart, is_active
from foreshock_service.runs.step_key import StepKey

_steps = table_of(Step).c
_OF_STEP = tuple(_steps[name] == bindparam(name) for name in StepKey._fields)
_COUNTS = Prepared(select(_steps.rollouts, _steps.full_rollouts).where(*_OF_STEP))
_INCOMPLETE = Prepared(
    select(_steps.received_shards, _steps.expected_shards).where(
        *_OF_STEP, _steps.closed_at_us.is_not(None), _steps.received_shards < _steps.expected_shards
    )
)


def counts(session: Session, key: StepKey) -> tuple[int, int | None] | None:
    """Return the rollouts of a step, and those stored in full (None: all); None without such a step."""
    row = _COUNTS.first(session, key._asdict())
    return None if row is None else (row[0], row[1])


def incomplete_counts(session: Session, key: StepKey) -> tuple[int, int] | None:
    """Return the shards that a step has and was opened with, if it closed without some of them; None otherwise."""
    row = _INCOMPLETE.first(session, key._asdict())
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
