"""Queries on the outbox. All times are the database's, since several processes send from one outbox."""

import secrets
from collections.abc import Sequence
from typing import Any

from sqlalchemy import Select, and_, delete, exists, select
from sqlalchemy.orm import Session, aliased

from foreshock.severity import severity_rank
from foreshock_service.platform.database.engine import insert_if_absent
from foreshock_service.platform.database.tables import Alert, Notification, Run, new_identifier
from foreshock_service.platform.settings import NotificationTarget

OPENED, RESOLVED = "opened", "resolved"


def alerts_to_tell(
    session: Session, target: NotificationTarget, severities: Sequence[str], since_us: int, limit: int
) -> list[tuple[str, str]]:
    """Return (alert, change) of alerts changed since then whose opening, or end, is not in the outbox yet."""
    told = exists().where(
        Notification.target == target.name, Notification.alert_id == Alert.id, Notification.change == OPENED
    )
    opened = _of_target(target, severities, since_us).where(Alert.state == "open", ~told).limit(limit)
    found = [(alert_id, OPENED) for alert_id in session.scalars(opened)]
    if target.tells_resolved:
        sent, ended = aliased(Notification), aliased(Notification)
        was_sent = and_(
            sent.target == target.name, sent.alert_id == Alert.id, sent.change == OPENED, sent.sent_at_us.is_not(None)
        )
        is_known = exists().where(ended.target == target.name, ended.alert_id == Alert.id, ended.change == RESOLVED)
        query = _of_target(target, severities, since_us).join(sent, was_sent)
        query = query.where(Alert.state.in_(("resolved", "retracted")), ~is_known).limit(limit)
        found += [(alert_id, RESOLVED) for alert_id in session.scalars(query)]
    return found


def is_told_by_episode(session: Session, target: str, alert: Alert) -> bool:
    """Return whether the target was told of an alert of the same episode that is as severe, or is about to be."""
    episode = (alert.evidence.get("cause"), alert.evidence.get("episode"))
    if None in episode:
        return False
    told = (
        select(Alert)
        .join(Notification, Notification.alert_id == Alert.id)
        .where(
            Notification.target == target,
            Notification.change == OPENED,
            Notification.state != "dropped",
            Alert.run_id == alert.run_id,
            Alert.attempt == alert.attempt,
            Alert.id != alert.id,
            Alert.step >= alert.evidence["episode"],
        )
    )
    return any(
        (other.evidence.get("cause"), other.evidence.get("episode")) == episode
        and severity_rank(other.severity) <= severity_rank(alert.severity)
        for other in session.scalars(told)
    )


def add(session: Session, target: str, alert_id: str, change: str, now_us: int, state: str = "pending") -> None:
    """Add a message to the outbox, unless it is there."""
    row = {
        "id": new_identifier("notification"), "target": target, "alert_id": alert_id, "change": change,
        "state": state, "tries": 0, "due_at_us": now_us, "lease": None, "leased_until_us": 0, "error": None,
        "created_at_us": now_us, "sent_at_us": None,
    }  # fmt: skip
    insert_if_absent(session, Notification, row)


def lease_next(session: Session, target: str, now_us: int, until_us: int) -> Notification | None:
    """Return the message that is due first, leased to the caller until `until_us`; None if none is due."""
    query = (
        select(Notification)
        .where(
            Notification.target == target,
            Notification.state == "pending",
            Notification.due_at_us <= now_us,
            Notification.leased_until_us <= now_us,
        )
        .order_by(Notification.due_at_us, Notification.id)
        .limit(1)
        .with_for_update(skip_locked=True)
        .execution_options(populate_existing=True)
    )
    row = session.scalar(query)
    if row is not None:
        row.lease = secrets.token_hex(8)
        row.leased_until_us = until_us
        row.tries += 1
        session.flush()
    return row


def held(session: Session, notification_id: str, lease: str) -> Notification | None:
    """Return the message, locked, if this lease still holds it."""
    query = select(Notification).where(Notification.id == notification_id, Notification.lease == lease)
    return session.scalar(query.with_for_update().execution_options(populate_existing=True))


def alert_and_run(session: Session, alert_id: str) -> tuple[Alert, Run] | None:
    """Return an alert with its run."""
    found = session.execute(select(Alert, Run).join(Run, Run.id == Alert.run_id).where(Alert.id == alert_id)).first()
    return None if found is None else (found[0], found[1])


def delete_before(session: Session, created_before_us: int) -> None:
    """Delete messages that were created before then and are not pending for a target that still takes them."""
    session.execute(delete(Notification).where(Notification.created_at_us < created_before_us))


def _of_target(target: NotificationTarget, severities: Sequence[str], since_us: int) -> Select[Any]:
    query = (
        select(Alert.id)
        .join(Run, Run.id == Alert.run_id)
        .where(Alert.changed_at_us >= since_us, Alert.severity.in_(severities), Run.deleted_at_us.is_(None))
        .order_by(Alert.changed_at_us)
    )
    return query.where(Run.project.in_(target.projects)) if target.projects else query
