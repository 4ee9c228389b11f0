"""Alerts: list, acknowledge and resolve them, and reconcile them with detection.

A rule that fires opens an alert, one that clears resolves it; alerts whose rule no longer fires are retracted.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

from fastapi import Header, Path, Query, Response
from sqlalchemy import Select, func, select, union_all
from sqlalchemy.orm import Session
from starlette.concurrency import run_in_threadpool

from foreshock.api.records import from_attributes
from foreshock.api.watch import STANDING, AlertOfRun, AlertRecord, AlertState
from foreshock.clock import now_us
from foreshock.diagnosis.rule import DELIVERY_RULES, Event
from foreshock.severity import Severity, severity_rank
from foreshock_service.platform import audit, pagination, parameters, problem, security
from foreshock_service.platform.context import Context
from foreshock_service.platform.database.tables import Alert, Run, new_identifier
from foreshock_service.runs import attempts, due, events, runs
from foreshock_service.watch import long_polls
from foreshock_service.watch.detection.derivation import DetectionDerived


class AlertFilter(NamedTuple):
    """A filter of the alerts of all runs; empty: no restriction. A run's project must equal all of `projects`."""

    projects: tuple[str, ...] = ()
    states: tuple[AlertState, ...] = ()
    severities: tuple[Severity, ...] = ()
    rules: tuple[str, ...] = ()


_Answer = Literal["acknowledge", "resolve"]
_ANSWERS: Mapping[_Answer, tuple[AlertState, tuple[AlertState, ...], str]] = {
    "acknowledge": (
        "acknowledged",
        ("resolved", "retracted"),
        "an alert that is {} cannot be acknowledged; only open alerts can",
    ),
    "resolve": ("resolved", ("retracted",), "a {} alert cannot be resolved: with late data its rule does not fire"),
}
"""The state of an alert after a person's answer, and the states in which it cannot be answered so."""


class AlertNotFound(problem.ProblemError, status=404, problem_type="alert-not-found"):
    """The run has no such alert."""


class AlertConflict(problem.ProblemError, status=409, problem_type="alert-conflict"):
    """The alert's state does not allow the change."""


def alerts_of_run(
    session: Session,
    principal: security.Principal,
    run_id: str,
    states: Sequence[AlertState],
    cursor: str | None,
    limit: int,
) -> pagination.Page[AlertRecord]:
    """Return one page of a run's alerts, newest step first; no states: all of them. Raises RunNotFound, RunDeleted."""
    runs.get_run(session, principal, run_id)
    query = select(Alert).where(Alert.run_id == run_id, *pagination.among((Alert.state, states)))
    return pagination.page_of_query(
        session, query, (Alert.step, Alert.id), cursor, limit,
        lambda rows: [from_attributes(AlertRecord, row) for (row,) in rows],
    )  # fmt: skip


def alerts_of_runs(
    session: Session, chosen: AlertFilter, cursor: str | None, limit: int
) -> pagination.Page[AlertOfRun]:
    """Return one page of the alerts of all chosen runs that are not deleted, the last changed first."""

    def read(rows: Sequence[Any]) -> list[AlertOfRun]:
        return [_of_run(alert, run) for alert, run in rows]

    columns = (Alert.changed_at_us, Alert.id)
    return pagination.page_of_query(session, _chosen_alerts(chosen), columns, cursor, limit, read)


def alerts_by_run(session: Session, chosen: AlertFilter, most: int) -> list[tuple[Run, list[AlertOfRun]]]:
    """Return the `most` last changed of the chosen alerts by run: running runs first, then by the worst severity."""
    found: dict[str, tuple[Run, list[AlertOfRun]]] = {}
    query = _chosen_alerts(chosen).order_by(Alert.changed_at_us.desc()).limit(most)
    for alert, run in session.execute(query).all():
        found.setdefault(run.id, (run, []))[1].append(_of_run(alert, run))
    worst = {run_id: min(severity_rank(alert.severity) for alert in alerts) for run_id, (_, alerts) in found.items()}
    return sorted(found.values(), key=lambda each: (has_ended(each[0]), worst[each[0].id]))


def has_ended(run: Run) -> bool:
    """Return whether the run is over; its open alerts stay as they were at its end."""
    return run.state in ("finished", "failed")


def _chosen_alerts(chosen: AlertFilter) -> Select[Alert, Run]:
    query = select(Alert, Run).join(Run, Run.id == Alert.run_id).where(Run.deleted_at_us.is_(None))
    query = query.where(*(Run.project == project for project in chosen.projects))
    of_column = ((Alert.state, chosen.states), (Alert.severity, chosen.severities), (Alert.rule, chosen.rules))
    return query.where(*pagination.among(*of_column))


def _of_run(alert: Alert, run: Run) -> AlertOfRun:
    return from_attributes(AlertOfRun, alert, run=run.id, run_key=run.key, project=run.project)


def open_alerts(session: Session, run_id: str) -> Sequence[Alert]:
    """Return the run's open alerts, newest step first."""
    query = select(Alert).where(Alert.run_id == run_id, Alert.state == "open")
    return session.scalars(query.order_by(Alert.step.desc(), Alert.id.desc())).all()


def standing_alerts(session: Session, run_id: str, rule: str) -> Sequence[Alert]:
    """Return the run's alerts of a rule that have not ended."""
    query = select(Alert).filter_by(run_id=run_id, rule=rule).where(Alert.state.in_(STANDING))
    return session.scalars(query.order_by(Alert.step)).all()


def answer(
    session: Session, principal: security.Principal, run_id: str, alert_id: str, given: _Answer, reason: str = ""
) -> Alert:
    """Acknowledge or resolve an alert, and log `reason`. Raises AlertNotFound, and AlertConflict if it has ended."""
    run = runs.lock_run(session, principal, run_id)
    alert = session.scalar(select(Alert).where(Alert.run_id == run_id, Alert.id == alert_id))
    if alert is None:
        raise AlertNotFound(f"the run has no alert {alert_id}")
    state, ended, refusal = _ANSWERS[given]
    if alert.state in ended:
        raise AlertConflict(refusal.format(alert.state))
    if alert.state != state:
        before = {"state": alert.state, "rule": alert.rule, "step": alert.step}
        after = {"state": state} | ({"reason": reason} if reason else {})
        audit.record(
            session, principal, f"alert.{given}", alert.id,
            project=run.project, run_id=run.id, before=before, after=after,
        )  # fmt: skip
        change(session, alert, "operator", state=state)
        due.mark(session, run.id)
    return alert


def change(session: Session, alert: Alert, changed_by: str, **values: Any) -> None:
    """Change an alert, as the next version of its run's alerts. The run is locked."""
    values |= {"version": version(session, alert.run_id) + 1, "changed_at_us": now_us(), "changed_by": changed_by}
    for name, value in values.items():
        setattr(alert, name, value)
    session.flush()


def add(session: Session, run_id: str, **values: Any) -> None:
    """Add an alert that the detectors or the delivery open, as the next version. The run is locked."""
    stamp = {"version": version(session, run_id) + 1, "changed_at_us": now_us(), "changed_by": "detector"}
    session.add(Alert(id=new_identifier("alert"), run_id=run_id, **{"opened_at_us": now_us(), **values, **stamp}))
    session.flush()


def reconcile_alerts(session: Session, derived: DetectionDerived) -> None:
    """Change the run's alerts to what the detectors found. The run is locked."""
    fired = {(event.rule, event.step): (event, attempt) for event, attempt in derived.events if event.change == "fired"}
    cleared = {(event.rule, event.fired_step): event.step for event, _ in derived.events if event.change == "cleared"}
    known = {(alert.rule, alert.step): alert for alert in active_touching(session, derived.run_id, derived.from_step)}
    for rule, step in cleared:
        # The rule may have fired before the first step that was derived.
        if (rule, step) not in known and (rule, step) not in fired:
            attempt = attempts.active_attempt_of(attempts.attempts_of_run(session, derived.run_id), step)
            alert = at_step(session, derived.run_id, attempt, rule, step)
            if alert is not None:
                known[rule, step] = alert
    changes = {
        key: _changes(known.get(key), fired.get(key), cleared.get(key), derived.from_step)
        for key in sorted(known.keys() | fired.keys(), key=lambda each: (each[1], each[0]))
    }
    for key, values in changes.items():
        if "state" in values:
            found_at = cleared.get(key) if values["state"] == "resolved" else None
            values["quiet"] = (key[1] if found_at is None else found_at) <= derived.judged_until
        if key in known and values:
            change(session, known[key], "detector", **values)
        elif key not in known:
            add(session, derived.run_id, **values)


def resolve_superseded(session: Session, started: events.AttemptStarted) -> None:
    """Resolve the alerts of steps that the new attempt has superseded. The run is locked."""
    superseded = ~attempts.active_rows(session, started.run_id, Alert)
    standing = select(Alert).where(Alert.run_id == started.run_id, Alert.state.in_(STANDING), superseded)
    for alert in session.scalars(standing).all():
        change(session, alert, "rewind", state="resolved")


def _changes(
    alert: Alert | None, fired: tuple[Event, int] | None, cleared_step: int | None, from_step: int
) -> dict[str, Any]:
    """Return the columns that change, with their new values."""
    wanted: dict[str, Any] = {"cleared_step": cleared_step, "state": "open" if cleared_step is None else "resolved"}
    if fired is not None:
        event, attempt = fired
        wanted |= {name: getattr(event, name) for name in _OF_EVENT} | {
            "attempt": attempt, "evidence": dict(event.evidence),
        }  # fmt: skip
    if alert is None:
        return wanted
    if fired is None and alert.step >= from_step:
        return {} if alert.state == "retracted" else {"state": "retracted", "cleared_step": None}
    # An alert that a person resolved stays resolved. One that the detector resolved opens again if it did not clear.
    stays = alert.state in ("open", "acknowledged") or (alert.state == "resolved" and alert.changed_by != "detector")
    if cleared_step is None and stays:
        wanted["state"] = alert.state
    elif wanted["state"] == "open":
        wanted["opened_at_us"] = now_us()
    return {name: value for name, value in wanted.items() if getattr(alert, name) != value}


_OF_EVENT = ("rule", "step", "severity", "value", "threshold", "why", "what_to_do", "moves_learning_rate")


def active_touching(session: Session, run_id: str, from_step: int) -> list[Alert]:
    """Return the detectors' alerts of active steps that fired or cleared at `from_step` or later, by step and rule."""
    of_run = select(Alert.id).where(Alert.run_id == run_id)
    # Each half reads a range of an index and no other alert of the run, however many attempts it has. `step + 0` is not
    # indexed: with `step`, SQLite would use the index of steps for the second half.
    cleared = of_run.where(Alert.cleared_step >= from_step, Alert.step + 0 < from_step)
    ids = session.scalars(union_all(of_run.where(Alert.step >= from_step), cleared)).all()
    if not ids:
        return []
    found = session.scalars(select(Alert).where(Alert.id.in_(ids), Alert.rule.not_in(DELIVERY_RULES))).all()
    active = (alert for alert in found if attempts.is_active(session, alert))
    return sorted(active, key=lambda alert: (alert.step, alert.rule))


def standing_of_rule(session: Session, run_id: str, attempt: int, rule: str) -> Alert | None:
    """Return the open or acknowledged alert of a rule in an attempt."""
    return next((each for each in standing_alerts(session, run_id, rule) if each.attempt == attempt), None)


def at_step(session: Session, run_id: str, attempt: int | None, rule: str, step: int) -> Alert | None:
    """Return the alert of a rule at a step, in any state."""
    return session.scalar(select(Alert).filter_by(run_id=run_id, attempt=attempt, rule=rule, step=step))


def version(session: Session, run_id: str) -> int:
    """Return the version of the run's alerts: 0 before any alert, and higher with every change."""
    return session.scalar(select(func.max(Alert.version)).where(Alert.run_id == run_id)) or 0


router = parameters.api_router(prefix="/v1", tags=["alerts"])

Several = Query(max_length=20, description="absent: all")

AlertIdentifier = Annotated[str, Path(max_length=100, pattern=r"^[A-Za-z0-9_]+$")]


@router.get("/runs/{run}/alerts", response_model=pagination.Page[AlertRecord], responses=long_polls.NOT_MODIFIED)
async def list_alerts(
    asked: runs.RunToRead,
    polls: long_polls.LongPollsOfApp,
    state: Annotated[list[AlertState] | None, Query(max_length=4, description="absent: all")] = None,
    cursor: pagination.Cursor = None,
    limit: pagination.Limit = pagination.DEFAULT_LIMIT,
    wait: Annotated[
        float, Query(ge=0, le=long_polls.LONGEST_WAIT_SECONDS, description="seconds to wait for a change of an alert")
    ] = 0.0,
    if_none_match: Annotated[str | None, Header(max_length=1000)] = None,
) -> Response:
    """Return a run's alerts, newest step first; 304 if the bytes are those of If-None-Match.

    With `wait` and If-None-Match the answer comes when an alert of the run has changed since that answer.
    """
    await polls.until_changed(asked.principal, asked.run, lambda version: version.alerts, if_none_match, wait)

    def answer() -> Response:
        with asked.reading() as session:
            # Read first: alerts newer than their entity tag end the next poll at once, but older ones would be kept.
            newest = version(session, asked.run)
            found = alerts_of_run(session, asked.principal, asked.run, state or (), cursor, limit)
        return long_polls.tagged_response(str(newest), found, if_none_match)

    return await run_in_threadpool(answer)


@router.get("/alerts")
def list_alerts_of_runs(
    context: Context,
    principal: security.Reader,
    project: Annotated[parameters.Name | None, Query()] = None,
    state: Annotated[list[AlertState] | None, Several] = None,
    severity: Annotated[list[Severity] | None, Several] = None,
    rule: Annotated[list[parameters.Name] | None, Several] = None,
    cursor: pagination.Cursor = None,
    limit: pagination.Limit = 50,
) -> pagination.Page[AlertOfRun]:
    """Return the alerts of all runs that the key may see, the last changed first."""
    chosen = AlertFilter(principal.projects(project), tuple(state or ()), tuple(severity or ()), tuple(rule or ()))
    with context.database.read() as session:
        return alerts_of_runs(session, chosen, cursor, limit)


@router.post("/runs/{run}/alerts/{alert}/acknowledge")
def acknowledge_alert(
    run: runs.RunIdentifier, alert: AlertIdentifier, context: Context, principal: security.Ingester
) -> AlertRecord:
    """Mark the alert as seen by a person; 409 if it is resolved or retracted."""
    return context.database.write(
        lambda session: from_attributes(AlertRecord, answer(session, principal, run, alert, "acknowledge"))
    )


@router.post("/runs/{run}/alerts/{alert}/resolve")
def resolve_alert(
    run: runs.RunIdentifier, alert: AlertIdentifier, context: Context, principal: security.Ingester
) -> AlertRecord:
    """Resolve the alert; the rule may fire again later, as a new alert."""
    return context.database.write(
        lambda session: from_attributes(AlertRecord, answer(session, principal, run, alert, "resolve"))
    )
