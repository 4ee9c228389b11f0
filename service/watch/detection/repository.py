"""Queries on detector snapshots and on the closed steps that detectors replay."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import delete, insert, select
from sqlalchemy.orm import Session

from service.platform.database.tables import Attempt, DetectorSnapshot, Step
from service.runs.attempts.active_attempts import active_ranges, is_active


def closed_steps(session: Session, run_id: str, attempts: Sequence[Attempt], after: int) -> list[tuple[int, int]]:
    """Return (step, attempt) of the active closed steps beyond `after`, in order."""
    query = select(Step.step, Step.attempt).where(
        Step.run_id == run_id,
        Step.closed_at_us.is_not(None),
        is_active(attempts, Step.attempt, Step.step, first=after + 1),
    )
    return [(step, attempt) for step, attempt in session.execute(query.order_by(Step.step))]


def newest_snapshot(
    session: Session, run_id: str, attempts: Sequence[Attempt], before: int, configuration_digest: str
) -> DetectorSnapshot | None:
    """Return the newest snapshot of an active step before `before`."""
    # Ranges of one attempt at a time: each is read from the end of the primary key, however many snapshots there are.
    for each in active_ranges(attempts, last=before - 1):
        query = select(DetectorSnapshot).where(
            DetectorSnapshot.run_id == run_id,
            DetectorSnapshot.attempt == each.attempt,
            DetectorSnapshot.step >= each.first,
            DetectorSnapshot.step < each.end,
            DetectorSnapshot.configuration_digest == configuration_digest,
        )
        found = session.scalar(query.order_by(DetectorSnapshot.step.desc()).limit(1))
        if found is not None:
            return found
    return None


def drop_snapshots(session: Session, run_id: str, from_step: int) -> None:
    """Delete the snapshots from `from_step` on, those of superseded steps included."""
    session.execute(
        delete(DetectorSnapshot).where(DetectorSnapshot.run_id == run_id, DetectorSnapshot.step >= from_step)
    )


def drop_passing_snapshots(session: Session, run_id: str, keep: int) -> None:
    """Delete the snapshots that are no milestones, except the run's newest `keep` snapshots of either kind."""
    oldest_kept = (
        select(DetectorSnapshot.step)
        .where(DetectorSnapshot.run_id == run_id)
        .order_by(DetectorSnapshot.step.desc())
        .offset(keep - 1)
        .limit(1)
        .scalar_subquery()
    )
    session.execute(
        delete(DetectorSnapshot).where(
            DetectorSnapshot.run_id == run_id,
            DetectorSnapshot.milestone.is_(False),
            DetectorSnapshot.step < oldest_kept,
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
