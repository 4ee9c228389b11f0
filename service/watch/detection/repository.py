"""Queries on detector snapshots and on the closed steps that detectors replay."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import delete, insert, select
from sqlalchemy.orm import Session

from service.platform.database.tables import Attempt, DetectorSnapshot, Step
from service.runs.attempts.active_attempts import is_active


def closed_steps(session: Session, run_id: str, attempts: Sequence[Attempt], after: int) -> list[tuple[int, int]]:
    """(step, attempt) of the active closed steps beyond `after`, in order."""
    query = select(Step.step, Step.attempt).where(
        Step.run_id == run_id,
        Step.step > after,
        Step.closed_at_us.is_not(None),
        is_active(attempts, Step.attempt, Step.step),
    )
    return [(step, attempt) for step, attempt in session.execute(query.order_by(Step.step))]


def newest_snapshot(
    session: Session, run_id: str, attempts: Sequence[Attempt], before: int | None, configuration_digest: str
) -> DetectorSnapshot | None:
    """The newest snapshot of the active history, of steps before `before` where that is given."""
    query = select(DetectorSnapshot).where(
        DetectorSnapshot.run_id == run_id,
        DetectorSnapshot.configuration_digest == configuration_digest,
        is_active(attempts, DetectorSnapshot.attempt, DetectorSnapshot.step),
    )
    if before is not None:
        query = query.where(DetectorSnapshot.step < before)
    return session.scalar(query.order_by(DetectorSnapshot.step.desc()).limit(1))


def newest_snapshot_steps(session: Session, run_id: str, attempts: Sequence[Attempt], count: int) -> list[int]:
    """The steps of the newest `count` snapshots of the active history, newest first."""
    query = select(DetectorSnapshot.step).where(
        DetectorSnapshot.run_id == run_id, is_active(attempts, DetectorSnapshot.attempt, DetectorSnapshot.step)
    )
    return list(session.scalars(query.order_by(DetectorSnapshot.step.desc()).limit(count)))


def drop_snapshots(session: Session, run_id: str, from_step: int) -> None:
    """Forget the states from `from_step` on; the steps of superseded attempts are not replayed again."""
    session.execute(
        delete(DetectorSnapshot).where(DetectorSnapshot.run_id == run_id, DetectorSnapshot.step >= from_step)
    )


def drop_passing_snapshots(session: Session, run_id: str, before_step: int) -> None:
    """Forget the states before `before_step` that are no milestones."""
    session.execute(
        delete(DetectorSnapshot).where(
            DetectorSnapshot.run_id == run_id,
            DetectorSnapshot.step < before_step,
            DetectorSnapshot.milestone.is_(False),
        )
    )


def add_snapshots(session: Session, rows: list[dict[str, Any]]) -> None:
    """Insert snapshots of steps that have none."""
    if rows:
        session.execute(insert(DetectorSnapshot), rows)


def newest_snapshot_of_run(session: Session, run_id: str) -> DetectorSnapshot | None:
    """Return the newest snapshot; those of superseded steps are dropped when an attempt starts."""
    query = select(DetectorSnapshot).where(DetectorSnapshot.run_id == run_id)
    return session.scalar(query.order_by(DetectorSnapshot.step.desc()).limit(1))
