"""Alerts: list, acknowledge, resolve."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple, cast

from sqlalchemy.orm import Session

from foreshock.api.records import from_attributes
from foreshock.api.watch import AlertOfRun, AlertRecord, AlertState
from foreshock.clock import now_us
from foreshock_service.platform.audit.service import record
from foreshock_service.platform.database.tables import Alert, Run
from foreshock_service.platform.pagination import CursorKey, Page, decode_cursor, page_of
from foreshock_service.platform.problem import ProblemError
from foreshock_service.platform.security import Principal
from foreshock_service.runs.runs.service import get_run, lock_run
from foreshock_service.watch.alerts import repository
from foreshock_service.watch.alerts.schemas import AlertFilter

_ACTIONS: Mapping[AlertState, str] = {"acknowledged": "alert.acknowledge", "resolved": "alert.resolve"}


class AlertNotFound(ProblemError):
    """The run has no such alert."""

    status = 404
    problem_type = "alert-not-found"


class AlertConflict(ProblemError):
    """The alert's state does not allow the change."""

    status = 409
    problem_type = "alert-conflict"


class PageKey(NamedTuple):
    """A page of a run's alerts; no states: all of them."""

    run_id: str
    states: tuple[AlertState, ...]
    cursor: str | None
    limit: int


def read_page(session: Session, principal: Principal, key: PageKey) -> tuple[int, Page[AlertRecord]]:
    """Return the version of a run's alerts and a page of them. Raises RunNotFound and RunDeleted."""
    get_run(session, principal, key.run_id)
    # First, since alerts that are newer than their entity tag end the next poll, but older ones would be kept.
    current = version(session, key.run_id)
    return current, _page(session, key)


def list_alerts(
    session: Session, principal: Principal, run_id: str, states: Sequence[AlertState], cursor: str | None, limit: int
) -> Page[AlertRecord]:
    """Return one page of a run's alerts, newest step first."""
    get_run(session, principal, run_id)
    return _page(session, PageKey(run_id, tuple(states), cursor, limit))


def list_alerts_of_runs(session: Session, chosen: AlertFilter, cursor: str | None, limit: int) -> Page[AlertOfRun]:
    """Return one page of the alerts of all chosen runs, the last changed first."""
    after = cast("tuple[int, str]", decode_cursor(cursor, (int, str))) if cursor is not None else None
    rows = repository.newest_of_runs(session, chosen, after, limit + 1)
    found = [from_attributes(AlertOfRun, alert, run=alert.run_id, run_key=key, project=of) for alert, key, of in rows]
    return page_of(found, limit, lambda alert: (alert.changed_at_us, alert.id))


def open_alerts(session: Session, run_id: str) -> Sequence[Alert]:
    """Return the run's open alerts, newest step first."""
    return repository.in_state(session, run_id, "open")


def standing_of_runs(session: Session, run_ids: Collection[str]) -> Sequence[tuple[str, str, str, int]]:
    """Return (run, rule, severity, step) of the alerts that are open or acknowledged."""
    return repository.standing_of_runs(session, run_ids)


def open_counts(session: Session, run_ids: Collection[str]) -> dict[str, Counter[str]]:
    """Return the number of open alerts of each run by severity, in one query."""
    counts: dict[str, Counter[str]] = {run_id: Counter() for run_id in run_ids}
    for run_id, severity, count in repository.open_by_severity(session, run_ids):
        counts[run_id][severity] = count
    return counts


def version(session: Session, run_id: str) -> int:
    """Return the run's alert version: 0 before any alert, and higher with every change."""
    return repository.version(session, run_id)


def acknowledge(session: Session, principal: Principal, run_id: str, alert_id: str) -> Alert:
    """Mark the alert as seen by a person. Raises AlertConflict if it is resolved or retracted."""
    run, alert = _locked(session, principal, run_id, alert_id)
    if alert.state in ("resolved", "retracted"):
        raise AlertConflict(f"an alert that is {alert.state} cannot be acknowledged; only open alerts can")
    return _change(session, principal, run, alert, "acknowledged")


def resolve(session: Session, principal: Principal, run_id: str, alert_id: str) -> Alert:
    """Resolve the alert. Raises AlertConflict if it was retracted."""
    run, alert = _locked(session, principal, run_id, alert_id)
    if alert.state == "retracted":
        raise AlertConflict("a retracted alert cannot be resolved: with late data its rule does not fire")
    return _change(session, principal, run, alert, "resolved")


def _locked(session: Session, principal: Principal, run_id: str, alert_id: str) -> tuple[Run, Alert]:
    run = lock_run(session, principal, run_id)
    alert = repository.find(session, run_id, alert_id)
    if alert is None:
        raise AlertNotFound(f"the run has no alert {alert_id}")
    return run, alert


def _change(session: Session, principal: Principal, run: Run, alert: Alert, state: AlertState) -> Alert:
    if alert.state != state:
        before = {"state": alert.state, "rule": alert.rule, "step": alert.step}
        record(
            session, principal, _ACTIONS[state], alert.id,
            project=run.project, run_id=run.id, before=before, after={"state": state},
        )  # fmt: skip
        alert.version = repository.version(session, alert.run_id) + 1
        alert.state = state
        alert.changed_by = "operator"
        alert.changed_at_us = now_us()
        session.flush()
    return alert


def _page(session: Session, key: PageKey) -> Page[AlertRecord]:
    after = cast("tuple[int, str]", decode_cursor(key.cursor, (int, str))) if key.cursor is not None else None
    rows = repository.newest_first(session, key.run_id, key.states, after, key.limit + 1)
    return page_of([from_attributes(AlertRecord, row) for row in rows], key.limit, _key_of)


def _key_of(alert: AlertRecord) -> CursorKey:
    return (alert.step, alert.id)
