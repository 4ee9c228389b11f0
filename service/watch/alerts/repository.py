"""Queries on alerts."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import bindparam, func, select, tuple_, union_all
from sqlalchemy.orm import Session

from foreshock_service.platform.database.engine import table_of
from foreshock_service.platform.database.tables import Alert, Run
from foreshock_service.runs.active_steps import AttemptStart, active_attempt_of, is_active
from foreshock_service.watch.alerts.schemas import AlertFilter
from foreshock_service.watch.rules.service import DELIVERY_RULES

# Each half is a range of an index, so that the run's other alerts are not looked at,
# however many attempts it has. `step + 0` is not indexed: for the second half SQLite would take the index of steps.
_alerts = table_of(Alert).c
_OF_RUN = _alerts.run_id == bindparam("run_id")
_FIRED = select(_alerts.id).where(_OF_RUN, _alerts.step >= bindparam("from_step"))
_CLEARED = select(_alerts.id).where(
    _OF_RUN, _alerts.cleared_step >= bindparam("from_step"), _alerts.step + 0 < bindparam("from_step")
)
_TOUCHED = union_all(_FIRED, _CLEARED)


def find(session: Session, run_id: str, alert_id: str) -> Alert | None:
    """Return the alert of this run with this id."""
    return session.scalar(select(Alert).where(Alert.run_id == run_id, Alert.id == alert_id))


def newest_first(
    session: Session, run_id: str, states: Sequence[str], after: tuple[int, str] | None, limit: int
) -> Sequence[Alert]:
    """Return up to `limit` alerts by falling (step, id), before `after`; no states: all of them."""
    query = select(Alert).where(Alert.run_id == run_id)
    if states:
        query = query.where(Alert.state.in_(states))
    if after is not None:
        query = query.where(tuple_(Alert.step, Alert.id) < after)
    return session.scalars(query.order_by(Alert.step.desc(), Alert.id.desc()).limit(limit)).all()


def newest_of_runs(
    session: Session, chosen: AlertFilter, after: tuple[int, str] | None, limit: int
) -> Sequence[tuple[Alert, str, str]]:
    """Return up to `limit` alerts of runs that are not deleted, each with its run's key and project.

    They come by falling (changed_at_us, id), before `after`.
    """
    query = select(Alert, Run.key, Run.project).join(Run, Run.id == Alert.run_id).where(Run.deleted_at_us.is_(None))
    query = query.where(*(Run.project == project for project in chosen.projects))
    for column, values in (
        (Alert.state, chosen.states),
        (Alert.severity, chosen.severities),
        (Alert.rule, chosen.rules),
    ):
        if values:
            query = query.where(column.in_(values))
    if after is not None:
        query = query.where(tuple_(Alert.changed_at_us, Alert.id) < after)
    found = session.execute(query.order_by(Alert.changed_at_us.desc(), Alert.id.desc()).limit(limit))
    return [(alert, key, project) for alert, key, project in found]


def active_touching(session: Session, run_id: str, attempts: Sequence[AttemptStart], from_step: int) -> list[Alert]:
    """Return the detectors' alerts of active steps that fired or cleared at `from_step` or later, by step and rule."""
    ids = session.scalars(_TOUCHED, {"run_id": run_id, "from_step": from_step}).all()
    if not ids:
        return []
    found = session.scalars(select(Alert).where(Alert.id.in_(ids), Alert.rule.not_in(DELIVERY_RULES))).all()
    active = [alert for alert in found if active_attempt_of(attempts, alert.step) == alert.attempt]
    return sorted(active, key=lambda alert: (alert.step, alert.rule))


def standing(session: Session, run_id: str, attempts: Sequence[AttemptStart], rule: str, step: int) -> Alert | None:
    """Return the alert of a rule that fired at `step` of the active history."""
    query = select(Alert).where(
        Alert.run_id == run_id,
        Alert.attempt == active_attempt_of(attempts, step),
        Alert.rule == rule,
        Alert.step == step,
    )
    return session.scalar(query)


def standing_of_rule(session: Session, run_id: str, attempt: int, rule: str) -> Alert | None:
    """Return the open or acknowledged alert of a rule in an attempt."""
    query = select(Alert).where(
        Alert.run_id == run_id,
        Alert.attempt == attempt,
        Alert.rule == rule,
        Alert.state.in_(("open", "acknowledged")),
    )
    return session.scalar(query.order_by(Alert.step).limit(1))


def at_step(session: Session, run_id: str, attempt: int, rule: str, step: int) -> Alert | None:
    """Return the alert of a rule at a step, in any state."""
    query = select(Alert).where(Alert.run_id == run_id, Alert.attempt == attempt, Alert.rule == rule)
    return session.scalar(query.where(Alert.step == step))


def superseded(session: Session, run_id: str, attempts: Sequence[AttemptStart]) -> Sequence[Alert]:
    """Open or acknowledged alerts of steps that are not active."""
    query = select(Alert).where(
        Alert.run_id == run_id,
        Alert.state.in_(("open", "acknowledged")),
        ~is_active(attempts, Alert.attempt, Alert.step),
    )
    return session.scalars(query).all()


def version(session: Session, run_id: str) -> int:
    """Return the run's alert version: 0 before any alert, and higher with every change."""
    return session.scalar(select(func.max(Alert.version)).where(Alert.run_id == run_id)) or 0
