"""Sessions: `read` gives a read-only session, `write` runs a unit of work in a transaction. No other code commits."""

from __future__ import annotations

import hashlib
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from sqlalchemy import text
from sqlalchemy.exc import PendingRollbackError
from sqlalchemy.orm import Session

from foreshock.retry import Backoff, retry
from foreshock_service.platform.database.dialect import is_retryable
from foreshock_service.platform.database.engine import DEFAULT_CONNECTIONS, make_engine, make_reading_engine
from foreshock_service.platform.database.hooks import run_after_commit
from foreshock_service.platform.database.writer import GroupCommitWriter
from foreshock_service.platform.logs import span

Result = TypeVar("Result")
_MAX_ATTEMPTS = 5
_REMEMBERED_WRITES = 1000
# A deadlock's other transaction takes milliseconds; jitter keeps the two from meeting again.
_FIRST_RETRY_SECONDS = 0.01
_LONGEST_RETRY_SECONDS = 0.2


class Database:
    """One database: PostgreSQL with a transaction for each unit of work, SQLite with one writer and many readers."""

    def __init__(self, url: str, *, connections: int = DEFAULT_CONNECTIONS) -> None:
        self.url = url
        self._write_engine = make_engine(url, connections=connections)
        self.is_sqlite = self._write_engine.dialect.name == "sqlite"
        self._read_engine = make_reading_engine(self._write_engine, connections=connections)
        self._writer = GroupCommitWriter(self._write_engine) if self.is_sqlite else None
        # Of the newest writes, waiting included.
        self.write_seconds: deque[float] = deque(maxlen=_REMEMBERED_WRITES)

    @property
    def writes_waiting(self) -> int:
        """Return how many units of work wait for SQLite's writer."""
        return self._writer.waiting if self._writer is not None else 0

    @contextmanager
    def read(self) -> Iterator[Session]:
        """Give a session for reading; the loaded objects stay readable.

        Their changes are not stored, and the database refuses statements that write.
        """
        with Session(self._read_engine, expire_on_commit=False) as session:
            try:
                yield session
            except BaseException:
                # A rollback would expire the loaded objects.
                session.expunge_all()
                raise
            session.expunge_all()
            try:
                # Not a rollback: after one psycopg has every statement prepared anew, as it may have undone a DDL.
                session.commit()
            except PendingRollbackError:
                # The connection was lost, and the caller went on.
                session.rollback()

    def write(self, work: Callable[[Session], Result], on_queued: Callable[[], None] | None = None) -> Result:
        """Run `work(session)` in a transaction and return its result after the commit.

        On SQLite `on_queued` is called as soon as every later call of `write` is sure to run after this one. PostgreSQL
        has no such queue: there it is never called.

        `work` may run again: if PostgreSQL aborts it for a deadlock, or if another unit of its transaction raises on
        SQLite. So it changes nothing but the session.
        Raises what `work` raises, after rolling back.
        """
        begin = time.perf_counter()
        try:
            with span("database.write"):
                return self._write(work, on_queued)
        finally:
            self.write_seconds.append(time.perf_counter() - begin)

    def _write(self, work: Callable[[Session], Result], on_queued: Callable[[], None] | None) -> Result:
        if self._writer is not None:
            return self._writer.run(work, on_queued)
        return retry(
            lambda: self._write_directly(work),
            Backoff(_FIRST_RETRY_SECONDS, _LONGEST_RETRY_SECONDS),
            is_retryable=is_retryable,
            max_attempts=_MAX_ATTEMPTS,
        )

    def ping(self) -> None:
        """Raise unless the database answers."""
        with self.read() as session:
            session.execute(text("SELECT 1"))

    def check_writable(self) -> None:
        """Raise unless a transaction that writes can begin and commit."""
        if self.is_sqlite:
            # Writes the first page, with the value that it has.
            self.write(lambda session: session.execute(text("PRAGMA user_version = 0")))
            return
        # Not the engine for reading, whose transactions are always read-only.
        with self._write_engine.connect() as connection:
            if connection.execute(text("SHOW transaction_read_only")).scalar_one() == "on":
                raise RuntimeError("the database is read-only")
            connection.commit()

    @contextmanager
    def exclusive(self, name: str) -> Iterator[bool]:
        """Give True if no other process holds this name for the length of its `with` block, else False.

        For background work that one process at a time does. PostgreSQL releases the name with the connection, however
        the process ends; SQLite has one service process.
        """
        if self.is_sqlite:
            yield True
            return
        key = {"key": int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], signed=True)}
        with self._write_engine.connect() as connection:
            held = connection.execute(text("SELECT pg_try_advisory_lock(:key)"), key).scalar_one()
            # The lock belongs to the connection; a transaction that stays open would keep old rows from vacuum.
            connection.commit()
            try:
                yield bool(held)
            finally:
                if held:
                    connection.execute(text("SELECT pg_advisory_unlock(:key)"), key)
                    connection.commit()

    def close(self) -> None:
        """Finish the queued writes and close every connection."""
        if self._writer is not None:
            self._writer.close()
        self._write_engine.dispose()
        self._read_engine.dispose()

    def _write_directly(self, work: Callable[[Session], Result]) -> Result:
        with Session(self._write_engine, expire_on_commit=False) as session:
            with session.begin():
                result = work(session)
            run_after_commit(session)
        return result
