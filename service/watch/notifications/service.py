"""Fill the outbox from the alerts, and empty it into the targets: each message once, in order, with backoff.

The outbox is filled by looking for alerts that changed in the last day, not where alerts change: alerts of an imported
history that have ended by then are not sent, and the service may have been away. Several processes share one outbox: a
message is leased while it is sent. A process that dies in between sends it again after the lease.
"""

import logging
import threading

from sqlalchemy.orm import Session

from foreshock import page_addresses, retry, severity
from foreshock.api.diagnosis import RunVerdict
from foreshock_service.platform.context import ServiceContext
from foreshock_service.platform.database.engine import database_now_us
from foreshock_service.platform.database.tables import Alert, Notification, Run
from foreshock_service.platform.settings import NotificationTarget
from foreshock_service.runs.diagnoses import verdicts_of_runs
from foreshock_service.watch.notifications import repository
from foreshock_service.watch.notifications.repository import OPENED
from foreshock_service.watch.notifications.sending import Message, SendingFailed, send

_SECOND_US = 1_000_000
_HORIZON_US = 24 * 3600 * _SECOND_US
"""Alerts that changed longer ago are not looked for, and a message that could not be sent for so long is given up."""
_KEPT_US = 30 * 24 * 3600 * _SECOND_US
_LEASE_US = 60 * _SECOND_US
_SEND_AGAIN_US = 60 * _SECOND_US
_FIRST_RETRY_SECONDS = 5.0
_LONGEST_RETRY_SECONDS = 600.0
_AT_ONCE = 100
_INTERVAL_SECONDS = 2.0

_logger = logging.getLogger(__name__)


class Notifier:
    """A thread for each target, so that one that hangs delays no other."""

    def __init__(self, context: ServiceContext) -> None:
        self._context = context
        self._stopping = threading.Event()
        self._threads = [
            threading.Thread(target=self._loop, args=(target,), name=f"foreshock-notify-{target.name}", daemon=True)
            for target in context.settings.notifications
        ]

    def start(self) -> None:
        """Start the threads."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Finish the messages that are under way, then end the threads."""
        self._stopping.set()
        for thread in self._threads:
            thread.join()

    def _loop(self, target: NotificationTarget) -> None:
        while not self._stopping.wait(_INTERVAL_SECONDS):
            try:
                fill_outbox(self._context, target)
                while not self._stopping.is_set() and send_next(self._context, target):
                    pass
            except Exception:
                _logger.exception("notifying %s failed; it runs again in %s s", target.name, _INTERVAL_SECONDS)


def fill_outbox(context: ServiceContext, target: NotificationTarget) -> int:
    """Add the messages about alerts that the target has not been told; return their number."""
    severities = [
        each for each in severity.SEVERITIES if severity.severity_rank(each) <= severity.severity_rank(target.severity)
    ]
    with context.database.read() as session:
        since_us = database_now_us(session) - _HORIZON_US
        found = repository.alerts_to_tell(session, target, severities, since_us, _AT_ONCE)
    if found:
        context.database.write(lambda session: _add(session, target, found))
    return len(found)


def send_next(context: ServiceContext, target: NotificationTarget) -> bool:
    """Send the message that is due first; return False if none is due."""
    leased = context.database.write(lambda session: _lease(session, context, target))
    if leased is None:
        return False
    notification, message, now_us = leased
    if message is None:
        return True
    failure: SendingFailed | None = None
    try:
        send(target, message, now_us)
    except SendingFailed as error:
        failure = error
    context.database.write(lambda session: _settle(session, target, notification, failure))
    return True


def _add(session: Session, target: NotificationTarget, found: list[tuple[str, str]]) -> None:
    now_us = database_now_us(session)
    opened = [alert for alert_id, change in found if change == OPENED and (alert := session.get(Alert, alert_id))]
    # The most severe alert of an episode speaks for it.
    for alert in sorted(opened, key=lambda each: (severity.severity_rank(each.severity), each.step, each.rule)):
        # Alertmanager groups alerts itself.
        spoken = target.kind != "alertmanager" and repository.is_told_by_episode(session, target.name, alert)
        repository.add(session, target.name, alert.id, OPENED, now_us, "dropped" if spoken else "pending")
    for alert_id, change in found:
        if change != OPENED:
            repository.add(session, target.name, alert_id, change, now_us)
    repository.delete_before(session, now_us - _KEPT_US)


def _lease(
    session: Session, context: ServiceContext, target: NotificationTarget
) -> tuple[Notification, Message | None, int] | None:
    now_us = database_now_us(session)
    row = repository.lease_next(session, target.name, now_us, now_us + _LEASE_US)
    if row is None:
        return None
    found = repository.alert_and_run(session, row.alert_id)
    if found is None or found[1].deleted_at_us is not None or not _still_says(row, found[0]):
        row.state = "sent" if row.sent_at_us is not None else "dropped"
        return row, None, now_us
    said = verdicts_of_runs(session, [found[1].id])[found[1].id]
    return row, _message(row, *found, said, context.settings.page_root), now_us


def _still_says(row: Notification, alert: Alert) -> bool:
    """Return False if the opening was retracted, or was sent and need not be repeated."""
    if row.change != OPENED:
        return alert.state in ("resolved", "retracted")
    if row.sent_at_us is not None:
        return alert.state in ("open", "acknowledged")
    return alert.state != "retracted"


def _settle(session: Session, target: NotificationTarget, sent: Notification, failure: SendingFailed | None) -> None:
    row = repository.held(session, sent.id, str(sent.lease))
    if row is None:
        return
    now_us = database_now_us(session)
    row.lease, row.leased_until_us = None, 0
    row.error = None if failure is None else str(failure)
    if failure is None:
        row.sent_at_us = row.sent_at_us or now_us
        row.tries = 0
        repeated = target.kind == "alertmanager" and row.change == OPENED
        row.state = "pending" if repeated else "sent"
        row.due_at_us = now_us + _SEND_AGAIN_US
        return
    delay = retry.Backoff(_FIRST_RETRY_SECONDS, _LONGEST_RETRY_SECONDS, failures=row.tries - 1)
    row.due_at_us = now_us + int(delay.next_delay(failure.retry_after_seconds) * _SECOND_US)
    given_up = row.sent_at_us is None and row.due_at_us > row.created_at_us + _HORIZON_US
    row.state = "failed" if given_up else "pending"
    if given_up:
        _logger.error("target %s did not take a message for a day, it is given up: %s", target.name, failure)
    elif row.tries == 1:
        _logger.warning("target %s did not take a message, it is sent again: %s", target.name, failure)


def _message(row: Notification, alert: Alert, run: Run, said: RunVerdict, page_root: str) -> Message:
    return Message(
        id=row.id,
        change=row.change,
        alert_id=alert.id,
        rule=alert.rule,
        severity=next(each for each in severity.SEVERITIES if each == alert.severity),
        state=alert.state,
        attempt=alert.attempt,
        step=alert.step,
        cleared_step=alert.cleared_step,
        value=alert.value,
        threshold=alert.threshold,
        why=alert.why,
        what_to_do=alert.what_to_do,
        opened_at_us=alert.opened_at_us,
        changed_at_us=alert.changed_at_us,
        run_id=run.id,
        run_key=run.key,
        project=run.project,
        page=page_root + page_addresses.run_page_path(run.project, run.key),
        verdict=said.verdict,
        headline=said.headline,
    )
