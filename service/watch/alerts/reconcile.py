"""Bring alerts in line with detection: new ones open, cleared ones resolve, those that no longer fire are retracted."""

from __future__ import annotations

from typing import Any

from sqlalchemy.orm import Session

from foreshock.clock import now_us
from foreshock.diagnosis.rule import Event
from foreshock_service.platform.database.tables import Alert
from foreshock_service.platform.identifiers import new_identifier
from foreshock_service.runs.attempts.service import attempts_of_run
from foreshock_service.runs.events import AttemptStarted
from foreshock_service.watch.alerts import repository
from foreshock_service.watch.detection.derivation import DetectionDerived


def reconcile_alerts(session: Session, derived: DetectionDerived) -> None:
    """Bring the run's alerts in line with what the detectors found. The run is locked."""
    fired = {(event.rule, event.step): (event, attempt) for event, attempt in derived.events if event.change == "fired"}
    cleared = {(event.rule, event.fired_step): event.step for event, _ in derived.events if event.change == "cleared"}
    known = {
        (alert.rule, alert.step): alert
        for alert in repository.active_touching(session, derived.run_id, derived.attempts, derived.from_step)
    }
    for rule, step in cleared:
        # It may have fired before the first step that was derived.
        if (rule, step) not in known and (rule, step) not in fired:
            alert = repository.standing(session, derived.run_id, derived.attempts, rule, step)
            if alert is not None:
                known[rule, step] = alert
    changes = {
        key: _changes(known.get(key), fired.get(key), cleared.get(key), derived.from_step)
        for key in sorted(known.keys() | fired.keys(), key=lambda each: (each[1], each[0]))
    }
    changes = {key: values for key, values in changes.items() if values}
    if not changes:
        return
    version = repository.version(session, derived.run_id)
    for number, (key, values) in enumerate(changes.items(), start=1):
        stamp = {"version": version + number, "changed_at_us": now_us(), "changed_by": "detector"}
        if key in known:
            _set(known[key], values | stamp)
        else:
            _add(session, derived.run_id, values | stamp)
    session.flush()


def resolve_superseded(session: Session, started: AttemptStarted) -> None:
    """Resolve the alerts of steps that the new attempt has superseded. The run is locked."""
    run_id = started.run_id
    alerts = repository.superseded(session, run_id, attempts_of_run(session, run_id))
    version = repository.version(session, run_id)
    for number, alert in enumerate(alerts, start=1):
        stamp = {"version": version + number, "changed_at_us": now_us(), "changed_by": "rewind"}
        _set(alert, {"state": "resolved", **stamp})
    session.flush()


def _changes(
    alert: Alert | None, fired: tuple[Event, int] | None, cleared_step: int | None, from_step: int
) -> dict[str, Any]:
    """Return the columns that change; empty if none does."""
    if alert is None:
        assert fired is not None
        state = "open" if cleared_step is None else "resolved"
        return {**_columns(*fired), "cleared_step": cleared_step, "state": state}
    if fired is None and alert.step >= from_step:
        return {} if alert.state == "retracted" else {"state": "retracted", "cleared_step": None}
    wanted = {"cleared_step": cleared_step, "state": _state(alert, cleared_step)}
    if fired is not None:
        wanted |= _columns(*fired)
    return {name: value for name, value in wanted.items() if getattr(alert, name) != value}


def _state(alert: Alert, cleared_step: int | None) -> str:
    if alert.state == "retracted":
        return "open" if cleared_step is None else "resolved"
    if cleared_step is not None:
        return "resolved"
    # An alert that a person resolved stays resolved. One that the detector resolved opens again if it did not clear.
    return "open" if alert.state == "resolved" and alert.changed_by == "detector" else alert.state


def _columns(event: Event, attempt: int) -> dict[str, Any]:
    return {
        "attempt": attempt,
        "rule": event.rule,
        "step": event.step,
        "severity": event.severity,
        "value": event.value,
        "threshold": event.threshold,
        "why": event.why,
        "what_to_do": event.what_to_do,
        "moves_learning_rate": event.moves_learning_rate,
        "evidence": dict(event.evidence),
    }


def _set(alert: Alert, values: dict[str, Any]) -> None:
    for name, value in values.items():
        setattr(alert, name, value)


def _add(session: Session, run_id: str, values: dict[str, Any]) -> None:
    session.add(Alert(id=new_identifier("alert"), run_id=run_id, opened_at_us=now_us(), **values))
