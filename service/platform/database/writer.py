"""The one writer of SQLite: a thread that runs queued units of work and commits those that wait together.

A caller gets its result after the commit, so the result is durable. A unit that raises is rolled back alone: the others
of its transaction run again, each in a savepoint.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

from sqlalchemy import Connection, Engine
from sqlalchemy.orm import Session

from foreshock_service.platform.database.hooks import run_after_commit

Result = TypeVar("Result")
_LARGEST_BATCH = 64


@dataclass(eq=False, slots=True)
class _Unit:
    work: Callable[[Session], Any]
    future: Future[Any] = field(default_factory=Future)
    result: Any = None
    error: Exception | None = None
    session: Session | None = None

    def settle(self) -> None:
        """Run the after-commit hooks, then return the result, or raise the error, in the caller's thread."""
        if self.error is not None:
            self.future.set_exception(self.error)
            return
        if self.session is not None:
            run_after_commit(self.session)
        self.future.set_result(self.result)


class GroupCommitWriter:
    """Owner of the engine for writing; `run` may be called from any thread but the writer's own."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._queue: queue.SimpleQueue[_Unit | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._loop, name="foreshock-writer", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """Return how many units of work wait."""
        return self._queue.qsize()

    def run(self, work: Callable[[Session], Result], on_queued: Callable[[], None] | None = None) -> Result:
        """Run a unit of work and return its result once it is committed; raises what the unit raised.

        `on_queued` is called once the unit has its place in the queue: units that are queued later run later.
        """
        if threading.current_thread() is self._thread:
            raise RuntimeError("a unit of work must not start another one: pass it the session instead")
        unit = _Unit(work)
        with self._lock:
            if self._closed:
                raise RuntimeError("the database is closed")
            self._queue.put(unit)
        if on_queued is not None:
            on_queued()
        result: Result = unit.future.result()
        return result

    def close(self) -> None:
        """Run the queued units of work, then stop."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._queue.put(None)
        self._thread.join()

    def _loop(self) -> None:
        while (unit := self._queue.get()) is not None:
            batch, last = [unit], False
            while len(batch) < _LARGEST_BATCH and not self._queue.empty():
                following = self._queue.get()
                if following is None:
                    last = True
                    break
                batch.append(following)
            self._commit(batch)
            if last:
                return

    def _commit(self, batch: list[_Unit]) -> None:
        try:
            if len(batch) == 1:
                self._run_alone(batch[0])
            elif not self._run_together(batch):
                self._run_in_savepoints(batch)
        except Exception as error:
            for unit in batch:
                unit.error = unit.error or error
        for unit in batch:
            unit.settle()

    def _run_alone(self, unit: _Unit) -> None:
        # Without a savepoint: the transaction is the unit's own.
        with Session(self._engine, expire_on_commit=False) as session, session.begin():
            unit.result = unit.work(session)
        unit.session = session

    def _run_together(self, batch: list[_Unit]) -> bool:
        """Run the units and commit them, without savepoints, which copy each page; False if one raised."""
        # Closing the connection rolls back what was not committed.
        with self._engine.connect() as connection:
            transaction = connection.begin()
            for unit in batch:
                session = Session(connection, join_transaction_mode="rollback_only", expire_on_commit=False)
                try:
                    with session, session.begin():
                        unit.result = unit.work(session)
                except Exception:
                    # It runs again, and may not raise then.
                    return False
                unit.session = session
            transaction.commit()
        return True

    def _run_in_savepoints(self, batch: list[_Unit]) -> None:
        with self._engine.begin() as connection:
            for unit in batch:
                self._run_in_savepoint(connection, unit)

    def _run_in_savepoint(self, connection: Connection, unit: _Unit) -> None:
        session = Session(connection, join_transaction_mode="create_savepoint", expire_on_commit=False)
        try:
            with session, session.begin():
                unit.result = unit.work(session)
            unit.session = session
        except Exception as error:
            unit.error = error
