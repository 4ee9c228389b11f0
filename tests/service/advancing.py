"""Advance runs until nothing is due, in the thread of the test."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import update

from foreshock_service.platform.context import ServiceContext
from foreshock_service.platform.database.session import Database
from foreshock_service.platform.database.tables import Step
from foreshock_service.runs import due
from foreshock_service.watch.advance import Advancing, mark_waiting_runs

_in_this_thread = threading.local()


def advance_all(advancing: Advancing) -> None:
    """Advance every run that is due; called by what a worker does itself, do nothing."""
    if getattr(_in_this_thread, "is_busy", False):
        return
    _in_this_thread.is_busy = True
    try:
        for _ in range(1000):
            if not is_due(advancing):
                return
            if not advancing.advance_due_runs():
                # Another process may be at it.
                time.sleep(0.01)
        raise AssertionError("runs stay due")
    finally:
        _in_this_thread.is_busy = False


def is_due(advancing: Advancing) -> bool:
    """Return whether any run must be advanced."""
    with advancing._context.database.read() as session:
        return bool(due.due_runs(session))


@contextmanager
def paused(database: Database) -> Iterator[None]:
    """Let writes of this database wake nobody: the runs stay due."""
    wake = database.session_info.pop(due.WAKE, None)
    try:
        yield
    finally:
        if wake is not None:
            database.session_info[due.WAKE] = wake


def close_overdue(context: ServiceContext) -> int:
    """Close the open steps as if the grace time were over; return how many runs had one."""
    context.database.write(lambda session: session.execute(update(Step).values(last_shard_at_us=1)))
    return mark_waiting_runs(context)
