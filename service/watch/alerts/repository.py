"""Queries on alerts, detector snapshots, and the closed steps that detectors replay."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import ColumnElement, delete, func, insert, select, tuple_
from sqlalchemy.orm import Session

from service.platform.database.tables import Alert, Attempt, DetectorSnapshot, Step
from service.runs.attempts.active_attempts import survives


def find(session: Session, run_id: str, alert_id: str) -> Alert | None:
    """The alert of this run with this id."""
    return session.scalar(select(Alert).where(Alert.run_id == run_id, Alert.id == alert_id))


def newest_first(
    session: Session, run_id: str, states: Sequence[str], after: tuple[int, str] | None, limit: int
) -> Sequence[Alert]:
    """Up to `limit` alerts by falling (step, id), before `after`; no states: all of them."""
    query = select(Alert).where(Alert.run_id == run_id)
    if states:
        query = query.where(Alert.state.in_(states))
    if after is not None:
        query = query.where(tuple_(Alert.step, Alert.id) < after)
    return session.scalars(query.order_by(Alert.step.desc(), Alert.id.desc()).limit(limit)).all()


def in_state(session: Session, run_id: str, state: str) -> Sequence[Alert]:
    """The run's alerts in this state, newest step first."""
    query = select(Alert).where(Alert.run_id == run_id, Alert.state == state)
    return session.scalars(query.order_by(Alert.step.desc(), Alert.id.desc())).all()


def surviving_touching(session: Session, run_id: str, attempts: Sequence[Attempt], from_step: int) -> Sequence[Alert]:
    """Alerts of the surviving history that fired, or cleared, at `from_step` or later."""
    touched: ColumnElement[bool] = (Alert.step >= from_step) | (Alert.cleared_step >= from_step)
    query = select(Alert).where(Alert.run_id == run_id, survives(attempts, Alert.attempt, Alert.step), touched)
    return session.scalars(query.order_by(Alert.step, Alert.rule)).all()


def standing(session: Session, run_id: str, attempts: Sequence[Attempt], rule: str, step: int) -> Alert | None:
    """The alert of a rule that fired at `step` of the surviving history."""
    query = select(Alert).where(
        Alert.run_id == run_id, Alert.rule == rule, Alert.step == step, survives(attempts, Alert.attempt, Alert.step)
    )
    return session.scalar(query)


def superseded(session: Session, run_id: str, attempts: Sequence[Attempt]) -> Sequence[Alert]:
    """Open or acknowledged alerts of steps that do not survive."""
    query = select(Alert).where(
        Alert.run_id == run_id,
        Alert.state.in_(("open", "acknowledged")),
        ~survives(attempts, Alert.attempt, Alert.step),
    )
    return session.scalars(query).all()


def version(session: Session, run_id: str) -> int:
    """The run's alert version: 0 before any alert, and higher with every change."""
    return session.scalar(select(func.max(Alert.version)).where(Alert.run_id == run_id)) or 0


def counts_by_severity(session: Session, run_ids: Sequence[str]) -> dict[tuple[str, str], int]:
    """(run, severity) → open alerts."""
    query = (
        select(Alert.run_id, Alert.severity, func.count())
        .where(Alert.run_id.in_(run_ids), Alert.state == "open")
        .group_by(Alert.run_id, Alert.severity)
    )
    return {(run_id, severity): count for run_id, severity, count in session.execute(query)}


def closed_steps(session: Session, run_id: str, attempts: Sequence[Attempt], after: int) -> list[tuple[int, int]]:
    """(step, attempt) of the closed steps beyond `after` that survive, in order."""
    query = select(Step.step, Step.attempt).where(
        Step.run_id == run_id,
        Step.step > after,
        Step.closed_at_us.is_not(None),
        survives(attempts, Step.attempt, Step.step),
    )
    return [(step, attempt) for step, attempt in session.execute(query.order_by(Step.step))]


def newest_snapshot(
    session: Session, run_id: str, attempts: Sequence[Attempt], before: int | None, configuration_digest: str
) -> DetectorSnapshot | None:
    """The newest snapshot of the surviving history, of steps before `before` where that is given."""
    query = select(DetectorSnapshot).where(
        DetectorSnapshot.run_id == run_id,
        DetectorSnapshot.configuration_digest == configuration_digest,
        survives(attempts, DetectorSnapshot.attempt, DetectorSnapshot.step),
    )
    if before is not None:
        query = query.where(DetectorSnapshot.step < before)
    return session.scalar(query.order_by(DetectorSnapshot.step.desc()).limit(1))


def newest_snapshot_steps(session: Session, run_id: str, attempts: Sequence[Attempt], count: int) -> list[int]:
    """The steps of the newest `count` snapshots of the surviving history, newest first."""
    query = select(DetectorSnapshot.step).where(
        DetectorSnapshot.run_id == run_id, survives(attempts, DetectorSnapshot.attempt, DetectorSnapshot.step)
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
