"""The thread that derives detection again where much of a run's history follows a change: one run at a time.

The history is read and derived outside the writer, and one short transaction stores the result. Steps that closed or
changed meanwhile are taken in: the derivation goes back to before the first that changed, and on over the new ones.
"""

import logging
import threading
import time
from collections.abc import Callable
from functools import partial

from sqlalchemy.orm import Session

from foreshock_service.platform.context import EventBus, ServiceContext
from foreshock_service.platform.database.session import Database
from foreshock_service.runs.attempts import attempts_of_run
from foreshock_service.runs.runs import lock_run_for_background
from foreshock_service.watch.detection import states
from foreshock_service.watch.detection.derivation import STEPS_IN_TRANSACTION, Derivation, store
from foreshock_service.watch.detection.history import closed_steps_after, watched_as, watched_run
from foreshock_service.watch.detection.states import NOT_CHANGED, Due

_STEPS_READ_AT_ONCE = 500
_INTERVAL_SECONDS = 0.5

_PAUSE_SECONDS = 0.0002
"""After each step, of about 0.3 ms: threads of requests go on then, instead of waiting 5 ms for Python to switch."""

_ENDED = ("finished", "failed")
_logger = logging.getLogger(__name__)


class DerivationThread:
    """A thread that derives what is due; of several processes one does it at a time."""

    def __init__(self, context: ServiceContext) -> None:
        self._database, self._events = context.database, context.events
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="foreshock-detection", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread; what it was deriving stays due."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()

    def _loop(self) -> None:
        looked_for_outdated = False
        while not self._stopping.wait(_INTERVAL_SECONDS):
            try:
                if not looked_for_outdated:
                    note_outdated(self._database)
                    looked_for_outdated = True
                derive_due(self._events, self._database, self._stopping.is_set)
            except Exception:
                _logger.exception("deriving detection again failed; it is tried again in %s s", _INTERVAL_SECONDS)


def note_outdated(database: Database) -> int:
    """Note that detection is due where an upgrade changed the detectors or the form of states; return how many runs.

    A run that has ended keeps what its release found, as long as its state can be read.
    """
    outdated = []
    with database.read() as session:
        for run in states.watched_runs(session):
            newest = states.newest(session, run.id)
            assert newest is not None
            is_other = newest.configuration_digest != watched_as(session, run).digest
            if (is_other and run.state not in _ENDED) or newest.read() is None:
                outdated.append(run.id)
            time.sleep(_PAUSE_SECONDS)
    for run_id in outdated:
        database.write(partial(_note_outdated, run_id))
    return len(outdated)


def _note_outdated(run_id: str, session: Session) -> None:
    if lock_run_for_background(session, run_id) is not None:
        states.note_change(session, run_id, 0)


def derive_due(events: EventBus, database: Database, is_stopping: Callable[[], bool] = lambda: False) -> int:
    """Derive every run that is due, one after the other; return how many were derived."""
    with database.read() as session:
        runs = states.runs_due(session)
    if not runs:
        return 0
    with database.exclusive("derive detection") as is_alone:
        return sum(derive_run(events, run_id, database, is_stopping) for run_id in runs) if is_alone else 0


def derive_run(
    events: EventBus, run_id: str, database: Database, is_stopping: Callable[[], bool] = lambda: False
) -> bool:
    """Derive a run if it is due; return False if it is not, or if the thread is stopping."""
    derivation, first = None, 0
    while (due := database.write(partial(_begin, run_id))) is not None:
        with database.read() as session:
            attempts, watched = attempts_of_run(session, run_id), watched_run(session, run_id)
            if (
                derivation is None
                or derivation.watched.digest != watched.digest
                or not derivation.go_back_before(due.changed_step)
            ):
                start = states.newest_before(session, run_id, attempts, due.from_step, watched.digest)
                derivation = Derivation(watched, start)
                first = derivation.step + 1
        if not _derive_on(database, run_id, derivation, is_stopping):
            return False
        if database.write(partial(_store, events, run_id, first, derivation)):
            return True
    return False


def _begin(run_id: str, session: Session) -> Due | None:
    """Return what is due, and note the changes from here on."""
    run, due = lock_run_for_background(session, run_id), states.due(session, run_id)
    if run is None:
        states.drop_due(session, run_id)
        return None
    if due is not None:
        states.put_due(session, run_id, Due(due.from_step, NOT_CHANGED))
    return due


def _derive_on(database: Database, run_id: str, derivation: Derivation, is_stopping: Callable[[], bool]) -> bool:
    """Derive all steps after the last one; return False if the thread is stopping."""
    while True:
        with database.read() as session:
            attempts = attempts_of_run(session, run_id)
            steps = closed_steps_after(
                session, run_id, attempts, derivation.step, derivation.watched, _STEPS_READ_AT_ONCE
            )
        for step in steps:
            if is_stopping():
                return False
            derivation.go_on([step])
            time.sleep(_PAUSE_SECONDS)
        if len(steps) < _STEPS_READ_AT_ONCE:
            return True


def _store(events: EventBus, run_id: str, first: int, derivation: Derivation, session: Session) -> bool:
    """Store a derivation and return True; False if a step of it has changed, or if many steps have closed since."""
    run, due = lock_run_for_background(session, run_id), states.due(session, run_id)
    if run is None or due is None:
        states.drop_due(session, run_id)
        return True
    if due.changed_step <= derivation.step or watched_as(session, run).digest != derivation.watched.digest:
        return False
    attempts = attempts_of_run(session, run_id)
    steps = closed_steps_after(session, run_id, attempts, derivation.step, derivation.watched, STEPS_IN_TRANSACTION + 1)
    if len(steps) > STEPS_IN_TRANSACTION:
        return False
    # The transaction may run again.
    derivation = derivation.copied()
    derivation.go_on(steps)
    states.drop(session, run_id, first)
    states.drop_due(session, run_id)
    store(events, session, run_id, attempts, first, derivation)
    return True
