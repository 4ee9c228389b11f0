"""Notifications: which alerts and changed verdicts are sent to which target, and when."""

import logging
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple, cast

from sqlalchemy import ColumnElement, case, exists, or_, select
from sqlalchemy.orm import Session

from foreshock import page_addresses, retry, severity
from foreshock.api.watch import STANDING
from foreshock.diagnosis import episodes
from foreshock.diagnosis.history import PastAlert
from foreshock_service.platform.context import ServiceContext
from foreshock_service.platform.database.engine import database_now_us, insert_if_absent
from foreshock_service.platform.database.tables import (
    Alert,
    KnownTarget,
    Notification,
    Run,
    StoredDiagnosis,
    new_identifier,
)
from foreshock_service.platform.jobs import Job, JobRunner
from foreshock_service.platform.pagination import among
from foreshock_service.platform.settings import NotificationTarget
from foreshock_service.runs.diagnoses import NOTHING_YET, find_diagnosis
from foreshock_service.runs.runs import ENDED
from foreshock_service.watch.notifications.sending import Message, SendingFailed, send

_PREFIX = "verdict "


class Change(NamedTuple):
    """What a message is about: the opening or the end of an alert, or a run's verdict (`alert_id` is then the run's).

    `occurrence`: the `opened_at_us` of the alert, or the revision of the diagnosis since which it is the verdict.
    """

    run_id: str
    alert_id: str
    change: str
    occurrence: int


def verdicts_to_tell(
    session: Session, target: NotificationTarget, severities: Sequence[str], since_us: ColumnElement[int], limit: int
) -> list[Change]:
    """Return the messages about verdicts that are not in the outbox yet.

    Sent are verdicts of the target's severities; if it also wants ends, the first less severe verdict after one.
    """
    table = StoredDiagnosis
    of_run = (Notification.target == target.name, Notification.alert_id == table.run_id)
    told = (
        select(Notification.change)
        # Messages that became obsolete before they were sent, or that the target never took, do not count.
        .where(*of_run, Notification.state.in_(("pending", "sent")))
        .order_by(Notification.created_at_us.desc(), Notification.id.desc())
        .limit(1)
        .correlate(table)
        .scalar_subquery()
    )
    was_severe = told.in_([_PREFIX + each for each in severities])
    is_known = exists().where(*of_run, Notification.occurrence == table.verdict_revision)
    is_severe = table.verdict.in_(severities)
    query = (
        select(table.run_id, table.verdict, table.verdict_revision)
        .join(Run, Run.id == table.run_id)
        .where(table.changed_at_us >= since_us, ~table.quiet, Run.deleted_at_us.is_(None))
        .where(or_(is_severe, was_severe) if target.resolved else is_severe)
        .where(~is_known)
        .limit(limit)
    )
    found = session.execute(query.where(*among((Run.project, target.projects))))
    return [Change(run, run, f"{_PREFIX}{verdict}", revision) for run, verdict, revision in found]


def _message(session: Session, row: Notification, page_root: str) -> Message | None:
    """Return the message of a row; None if the run is deleted or the row is out of date."""
    of_verdict = row.change.startswith(_PREFIX)
    alert = None if of_verdict else session.get(Alert, row.alert_id)
    run = session.get(Run, row.run_id)
    if run is None or run.deleted_at_us is not None or (alert is not None and not _still_says(session, row, alert)):
        return None
    said = find_diagnosis(session, run.id) or NOTHING_YET
    if of_verdict and said.verdict != row.change.removeprefix(_PREFIX):
        return None
    page = page_root + page_addresses.run_page_path(run.project, run.key)
    return Message("verdict" if of_verdict else row.change, alert, run, page, said)


_SECOND_US = 1_000_000
_HORIZON_US = 24 * 3600 * _SECOND_US
"""Alerts that changed longer ago are not looked for. A message that could not be sent for this long is given up."""
_SEND_AGAIN_US = 60 * _SECOND_US
_FIRST_RETRY_SECONDS = 5.0
_LONGEST_RETRY_SECONDS = 600.0
_AT_ONCE = 100
_INTERVAL_SECONDS = 2.0

_logger = logging.getLogger(__name__)


def notifiers(context: ServiceContext) -> list[JobRunner]:
    """Return a thread for each target, so that a target that hangs delays no other."""
    return [
        JobRunner(
            f"notify-{target.name}",
            context.database,
            [Job(f"notify {target.name}", partial(notify, context, target), shared=False)],
            _INTERVAL_SECONDS,
        )
        for target in context.settings.notifications
    ]


def notify(context: ServiceContext, target: NotificationTarget) -> None:
    """Fill the outbox of a target and send what is due, until the service stops; one process at a time does it."""
    with context.database.exclusive(f"notify {target.name}") as is_alone:
        if is_alone:
            fill_outbox(context, target)
        while is_alone and not context.stopping.is_set() and send_next(context, target):
            pass


def fill_outbox(context: ServiceContext, target: NotificationTarget) -> int:
    """Add messages about alerts and verdicts that were not yet sent to the target; return their number.

    Of a run that has ended, what changed before the target was known is not told. What changed while no service ran, or
    just before one died, is told by the next one.
    """
    known_since_us = _known_since_us(context, target)
    severities = [
        each for each in severity.SEVERITIES if severity.severity_rank(each) <= severity.severity_rank(target.severity)
    ]
    with context.database.read() as session:
        horizon_us = database_now_us(session) - _HORIZON_US
        since_us = case((Run.state.in_(ENDED), max(known_since_us, horizon_us)), else_=horizon_us)
        found = alerts_to_tell(session, target, severities, since_us, _AT_ONCE)
        if target.verdicts and not target.is_alertmanager:
            found += verdicts_to_tell(session, target, severities, since_us, _AT_ONCE)
    if found:
        context.database.write(lambda session: _add(session, target, found))
    return len(found)


def _known_since_us(context: ServiceContext, target: NotificationTarget) -> int:
    """Return since when the service has known the target: from now on, if this is the first time."""
    query = select(KnownTarget.since_us).where(KnownTarget.target == target.name)
    with context.database.read() as session:
        since_us = session.scalar(query)
    if since_us is not None:
        return since_us

    def note(session: Session) -> int:
        row = {"target": target.name, "since_us": database_now_us(session)}
        insert_if_absent(session, KnownTarget, row)
        return session.scalars(query).one()

    return context.database.write(note)


def send_next(context: ServiceContext, target: NotificationTarget) -> bool:
    """Send the message that is due first; return False if none is due. No other process sends to the target."""
    with context.database.read() as session:
        now_us = database_now_us(session)
        due = (Notification.target == target.name, Notification.state == "pending", Notification.due_at_us <= now_us)
        order = (Notification.due_at_us, Notification.id)
        row = session.scalar(select(Notification).where(*due).order_by(*order).limit(1))
        if row is None:
            return False
        message = _message(session, row, context.settings.page_root)
    failure: SendingFailed | None = None
    if message is not None:
        try:
            send(target, message, now_us)
        except SendingFailed as error:
            failure = error

    def settle(session: Session) -> None:
        sent = session.get(Notification, row.id)
        if sent is not None and message is None:
            sent.state = "sent" if sent.sent_at_us is not None else "dropped"
        elif sent is not None:
            _settle(target, sent, failure, database_now_us(session))

    context.database.write(settle)
    return True


def _add(session: Session, target: NotificationTarget, found: Sequence[Change]) -> None:
    now_us = database_now_us(session)
    opened = [(each, alert) for each in found if each.change == OPENED and (alert := session.get(Alert, each.alert_id))]
    # Of an episode's alerts only the most severe is sent.
    opened.sort(key=lambda each: (severity.severity_rank(each[1].severity), each[1].step, each[1].rule))
    for change, alert in opened:
        spoken = is_told_by_episode(session, target.name, alert)
        add(session, target.name, change, now_us, "dropped" if spoken else "pending")
    for change in found:
        # An alert that ends before its episode is told about again later.
        if change.change != OPENED and not (change.change == RESOLVED and _goes_on(session, change.alert_id)):
            add(session, target.name, change, now_us)


def _still_says(session: Session, row: Notification, alert: Alert) -> bool:
    """Return whether the alert is still in the state that the row reports, of the same opening."""
    if row.occurrence != alert.opened_at_us:
        return False
    if row.change != OPENED:
        return alert.state in ("resolved", "retracted")
    if row.sent_at_us is not None:
        # Alertmanager is told as long as the episode lasts.
        return alert.state in STANDING or _goes_on(session, alert.id)
    return alert.state != "retracted"


def _settle(target: NotificationTarget, row: Notification, failure: SendingFailed | None, now_us: int) -> None:
    row.tries += 1
    row.error = None if failure is None else str(failure)
    if failure is None:
        row.sent_at_us = row.sent_at_us or now_us
        row.tries = 0
        repeated = target.is_alertmanager and row.change == OPENED
        row.state = "pending" if repeated else "sent"
        row.due_at_us = now_us + _SEND_AGAIN_US
        return
    delay = retry.Backoff(_FIRST_RETRY_SECONDS, _LONGEST_RETRY_SECONDS, failures=row.tries - 1)
    row.due_at_us = now_us + int(delay.next_delay() * _SECOND_US)
    given_up = row.sent_at_us is None and row.due_at_us > row.created_at_us + _HORIZON_US
    row.state = "failed" if given_up else "pending"
    if given_up:
        _logger.error("target %s did not take a message for a day, it is given up: %s", target.name, failure)
    elif row.tries == 1:
        _logger.warning("target %s did not take a message, it is sent again: %s", target.name, failure)


OPENED, RESOLVED = "opened", "resolved"


def alerts_to_tell(
    session: Session, target: NotificationTarget, severities: Sequence[str], since_us: ColumnElement[int], limit: int
) -> list[Change]:
    """Return the openings and ends of alerts changed since `since_us` that are not in the outbox yet.

    An alert that opens again is told again: its `opened_at_us` is another.
    """

    def is_known(change: str, *also: ColumnElement[bool]) -> ColumnElement[bool]:
        row = (Notification.target == target.name, Notification.alert_id == Alert.id, Notification.change == change)
        return exists().where(*row, Notification.occurrence == Alert.opened_at_us, *also)

    of_target = (
        select(Alert.run_id, Alert.id, Alert.opened_at_us)
        .join(Run, Run.id == Alert.run_id)
        .where(Alert.changed_at_us >= since_us, Alert.severity.in_(severities), Run.deleted_at_us.is_(None))
        .where(~Alert.quiet, *among((Run.project, target.projects)))
        .order_by(Alert.changed_at_us)
        .limit(limit)
    )
    found = [(OPENED, of_target.where(Alert.state == "open", ~is_known(OPENED)))]
    if target.tells_resolved:
        was_sent = is_known(OPENED, Notification.sent_at_us.is_not(None))
        ended = of_target.where(Alert.state.in_(("resolved", "retracted")), was_sent, ~is_known(RESOLVED))
        found.append((RESOLVED, ended))
    return [
        Change(run_id, alert_id, change, opened_at_us)
        for change, query in found
        for run_id, alert_id, opened_at_us in session.execute(query)
    ]


def is_told_by_episode(session: Session, target: str, alert: Alert) -> bool:
    """Return True if the target got a message of another alert of the run, which is open or of the same episode."""
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
        )
    )
    number = alert.evidence.get("episode")
    others = [
        _past(each)
        for each in session.scalars(told)
        if each.state in STANDING or (number is not None and each.evidence.get("episode") == number)
    ]
    return episodes.is_told(_past(alert), others)


def _goes_on(session: Session, alert_id: str) -> bool:
    """Return whether an alert has ended and another alert of its episode stands."""
    alert = session.get(Alert, alert_id)
    if alert is None or alert.state == "retracted":
        return False
    query = select(Alert).where(Alert.run_id == alert.run_id, Alert.attempt == alert.attempt, Alert.id != alert.id)
    standing = session.scalars(query.where(Alert.state.in_(STANDING), Alert.severity != "info"))
    family = episodes.family_of(alert.rule, alert.evidence)
    return any(episodes.family_of(each.rule, each.evidence) == family for each in standing)


def _past(alert: Alert) -> PastAlert:
    known = cast(severity.Severity, alert.severity)
    return PastAlert(alert.rule, known, alert.step, alert.state in STANDING, alert.why, evidence=alert.evidence)


def add(session: Session, target: str, change: Change, now_us: int, state: str = "pending") -> None:
    """Add a message to the outbox unless it is already there."""
    row = {
        "id": new_identifier("notification"), "target": target, **change._asdict(), "state": state, "tries": 0,
        "due_at_us": now_us, "error": None,
        "created_at_us": now_us, "sent_at_us": None,
    }  # fmt: skip
    insert_if_absent(session, Notification, row)
