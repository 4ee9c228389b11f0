"""Messages that the verdict of a run changed, in the outbox of the alerts.

A row has the run in place of the alert, and in `change` the verdict with its revision: a verdict may come again.
"""

from collections.abc import Sequence

from sqlalchemy import func, literal, or_, select
from sqlalchemy.orm import Session

from foreshock.page_addresses import run_page_path
from foreshock_service.platform.database.tables import Notification, Run, StoredDiagnosis
from foreshock_service.platform.settings import NotificationTarget
from foreshock_service.runs.diagnoses import verdicts_of_runs
from foreshock_service.watch.notifications.sending import VerdictMessage

_PREFIX = "verdict "


def verdicts_to_tell(
    session: Session, target: NotificationTarget, severities: Sequence[str], since_us: int, limit: int
) -> list[tuple[str, str]]:
    """Return (run, change) of runs whose verdict is not the one that the target was told last.

    Told are verdicts as severe as the target asks for, and, if it asks for ends, the first one that is less.
    """
    table = StoredDiagnosis
    told = (
        select(Notification.change)
        .where(Notification.target == target.name, Notification.alert_id == table.run_id)
        .order_by(Notification.created_at_us.desc(), Notification.id.desc())
        .limit(1)
        .correlate(table)
        .scalar_subquery()
    )
    last = func.coalesce(told, "")
    was_severe = or_(*(last.like(f"{_PREFIX}{each} %") for each in severities))
    is_severe = table.verdict.in_(severities)
    query = (
        select(table.run_id, table.verdict, table.revision)
        .join(Run, Run.id == table.run_id)
        .where(table.changed_at_us >= since_us, Run.deleted_at_us.is_(None))
        .where(or_(is_severe, was_severe) if target.resolved else is_severe)
        .where(last.not_like(literal(_PREFIX).concat(table.verdict).concat(" %")))
        .limit(limit)
    )
    if target.projects:
        query = query.where(Run.project.in_(target.projects))
    return [(run, f"{_PREFIX}{verdict} {revision}") for run, verdict, revision in session.execute(query)]


def is_of_verdict(row: Notification) -> bool:
    """Return whether a message is about a verdict."""
    return row.change.startswith(_PREFIX)


def verdict_message(session: Session, row: Notification, page_root: str) -> VerdictMessage | None:
    """Return the message; None if the run is deleted or has another verdict by now."""
    run = session.get(Run, row.alert_id)
    if run is None or run.deleted_at_us is not None:
        return None
    said = verdicts_of_runs(session, [run.id])[run.id]
    if said.verdict != row.change.split()[1]:
        return None
    page = page_root + run_page_path(run.project, run.key)
    return VerdictMessage(row.id, run.id, run.key, run.project, page, said.verdict, said.headline)
