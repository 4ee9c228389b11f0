"""The background jobs of detection: derive due runs again, and close the last steps of runs that log only scalars."""

import math
import time
from collections.abc import Callable
from functools import partial

from sqlalchemy import or_, select
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from foreshock.clock import now_us
from foreshock_service.platform.context import EventBus, ServiceContext
from foreshock_service.platform.database.session import Database
from foreshock_service.platform.database.tables import DetectorSnapshot, DueReplay, Run, ScalarTail
from foreshock_service.platform.jobs import Job, JobRunner
from foreshock_service.runs.attempts import attempts_of_run, is_active
from foreshock_service.runs.events import ScalarsLogged
from foreshock_service.runs.isolation import for_each_run
from foreshock_service.runs.runs import ENDED, lock_run_for_background
from foreshock_service.watch.detection import derivation, history, states
from foreshock_service.watch.detection.derivation import STEPS_IN_TRANSACTION, Derivation, store

_STEPS_READ_AT_ONCE = 500
_INTERVAL_SECONDS = 0.5

_PAUSE_SECONDS = 0.0002
"""Pause after each step of about 0.3 ms, so that request threads run without waiting 5 ms for Python to switch."""


def derivations(context: ServiceContext) -> JobRunner:
    """Return the thread that derives due runs; of several processes, one at a time does so."""
    events, database, is_stopping = context.events, context.database, context.stopping.is_set
    return JobRunner(
        "detection",
        database,
        [
            Job("note_outdated", partial(note_outdated, database), shared=False, every_seconds=math.inf),
            Job("derive_due", partial(derive_due, events, database, is_stopping), shared=False),
        ],
        _INTERVAL_SECONDS,
    )


def note_outdated(database: Database) -> int:
    """Mark as due the runs whose detectors, rules or format of states are others since the start; return their number.

    A run that has ended keeps what was found with its release and rules.
    """
    outdated = []
    with database.read() as session:
        having = select(DetectorSnapshot.run_id).where(DetectorSnapshot.run_id == Run.id).exists()
        going_on = (Run.deleted_at_us.is_(None), Run.state.not_in(ENDED))
        for run in session.scalars(select(Run).where(*going_on, having)).all():
            newest = states.newest(session, run.id)
            if newest is None:
                continue
            if newest.configuration_digest != history.watched_as(session, run).digest or newest.read() is None:
                outdated.append((run.id, newest.step))
            time.sleep(_PAUSE_SECONDS)
    for run_id, step in outdated:
        database.write(partial(_note_outdated, run_id, step))
    return len(outdated)


def _note_outdated(run_id: str, judged_until: int, session: Session) -> None:
    if lock_run_for_background(session, run_id) is not None:
        states.note_change(session, run_id, 0, judged_until)


def derive_due(events: EventBus, database: Database, is_stopping: Callable[[], bool] = lambda: False) -> int:
    """Derive every run that is due, one after the other; return how many were derived."""
    with database.read() as session:
        runs = session.scalars(select(DueReplay.run_id).order_by(DueReplay.run_id)).all()
    if not runs:
        return 0
    with database.exclusive("derive detection") as is_alone:
        if not is_alone:
            return 0
        return for_each_run(
            database, events, runs, lambda run_id: derive_or_give_up(events, run_id, database, is_stopping)
        )


def derive_or_give_up(
    events: EventBus, run_id: str, database: Database, is_stopping: Callable[[], bool] = lambda: False
) -> bool:
    """Derive a run that is due; after an error it is due no more, until its next step."""
    try:
        return derive_run(events, run_id, database, is_stopping)
    except SQLAlchemyError:
        raise
    except Exception:
        database.write(lambda session: states.drop_due(session, run_id))
        raise


def derive_run(
    events: EventBus, run_id: str, database: Database, is_stopping: Callable[[], bool] = lambda: False
) -> bool:
    """Derive a run if it is due; return False if it is not, or if the thread is stopping."""
    derivation, first = None, 0
    while (due := database.write(partial(_begin, run_id))) is not None:
        with database.read() as session:
            watched = history.watched_run(session, run_id)
            if (
                derivation is None
                or derivation.watched.digest != watched.digest
                or not derivation.go_back_before(due.changed_step)
            ):
                start = states.newest_before(session, run_id, due.from_step, watched.digest)
                derivation = Derivation(watched, start)
                first = derivation.step + 1
        if not _derive_on(database, run_id, derivation, is_stopping):
            return False
        if database.write(partial(_store, events, run_id, first, derivation)):
            return True
    return False


def _begin(run_id: str, session: Session) -> states.Due | None:
    """Return the due derivation, and record changes from now on separately."""
    run, due = lock_run_for_background(session, run_id), states.due(session, run_id)
    if run is None:
        states.drop_due(session, run_id)
        return None
    if due is not None:
        states.put_due(session, run_id, due._replace(changed_step=states.NOT_CHANGED))
    return due


def _derive_on(database: Database, run_id: str, derivation: Derivation, is_stopping: Callable[[], bool]) -> bool:
    """Derive all steps after the last one; return False if the thread is stopping."""
    while True:
        with database.read() as session:
            steps = history.closed_steps_after(
                session, run_id, derivation.step, derivation.watched, _STEPS_READ_AT_ONCE
            )
        for step in steps:
            if is_stopping():
                return False
            derivation.go_on([step])
            time.sleep(_PAUSE_SECONDS)
        if len(steps) < _STEPS_READ_AT_ONCE:
            return True


def _store(events: EventBus, run_id: str, first: int, derivation: Derivation, session: Session) -> bool:
    """Store a derivation and return True; False if one of its steps has changed or many steps have closed since."""
    run, due = lock_run_for_background(session, run_id), states.due(session, run_id)
    if run is None or due is None:
        states.drop_due(session, run_id)
        return True
    if due.changed_step <= derivation.step or history.watched_as(session, run).digest != derivation.watched.digest:
        return False
    steps = history.closed_steps_after(session, run_id, derivation.step, derivation.watched, STEPS_IN_TRANSACTION + 1)
    if len(steps) > STEPS_IN_TRANSACTION:
        return False
    # A copy, because the transaction may run again.
    derivation = derivation.copied()
    derivation.go_on(steps)
    states.drop(session, run_id, first)
    states.drop_due(session, run_id)
    store(events, session, run_id, first, derivation, due.judged_until)
    return True


_RUNS_PER_SWEEP = 100


def observe_scalars(events: EventBus, session: Session, logged: ScalarsLogged) -> None:
    """Derive detection over the steps that these scalars close or change. The run is locked.

    Scalars of superseded steps and scalars that no detector reads change nothing.
    """
    if logged.names.isdisjoint(history.watched_run(session, logged.run_id).names):
        return
    if not is_active(session, logged):
        return
    attempts = attempts_of_run(session, logged.run_id)
    tail = session.get(ScalarTail, logged.run_id)
    places = {each.attempt: place for place, each in enumerate(attempts)}
    here = (places[logged.attempt], logged.step)
    if tail is None:
        session.add(
            ScalarTail(
                run_id=logged.run_id, attempt=logged.attempt, step=logged.step, received_at_us=now_us(), closed=False
            )
        )
        session.flush()
        return
    before, was_closed = (places[tail.attempt], tail.step), tail.closed
    if here >= before:
        tail.attempt, tail.step = logged.attempt, logged.step
        tail.received_at_us = now_us()
        tail.closed = was_closed and here == before
        session.flush()
    is_newest_attempt = logged.attempt == attempts[-1].attempt
    if here[0] > before[0] or (here == before and is_newest_attempt and not was_closed):
        # The first step of an attempt, or the step that is still open: no step has closed.
        return
    derivation.derive_from(events, session, logged.run_id, min(here, before)[1])


def close_scalar_tails(context: ServiceContext) -> int:
    """Close the newest steps that got no scalars for the grace time, or whose run has ended; return how many."""
    before = now_us() - int(context.settings.step_grace_seconds * 1e6)
    due = (
        select(ScalarTail.run_id)
        .join(Run, Run.id == ScalarTail.run_id)
        .where(
            ScalarTail.closed.is_(False),
            Run.deleted_at_us.is_(None),
            or_(ScalarTail.received_at_us < before, Run.state.in_(ENDED)),
        )
    )
    with context.database.read() as session:
        runs = session.scalars(due.order_by(ScalarTail.run_id).limit(_RUNS_PER_SWEEP)).all()
    database, events = context.database, context.events
    return for_each_run(database, events, runs, lambda run_id: database.write(partial(_close, events, run_id)))


def _close(events: EventBus, run_id: str, session: Session) -> bool:
    run, tail = lock_run_for_background(session, run_id), session.get(ScalarTail, run_id)
    if run is None or tail is None or tail.closed:
        return False
    tail.closed = True
    session.flush()
    if run.last_step is None:
        derivation.derive_from(events, session, run_id, tail.step)
    return True
