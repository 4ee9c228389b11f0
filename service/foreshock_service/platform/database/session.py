"""Sessions: `read` gives a read-only session, `write` runs a unit of work in a transaction. No other code commits.

On SQLite one thread runs the queued units of work, one after the other. A caller gets its result after the commit, so
the result is durable. `after_commit` is the one way to do something after a commit.
"""

import hashlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from types import MappingProxyType
from typing import TypeVar

from sqlalchemy import event, text
from sqlalchemy.engine import URL
from sqlalchemy.exc import PendingRollbackError
from sqlalchemy.orm import Session

from foreshock.retry import Backoff, retry
from foreshock_service.platform.database import engine

Result = TypeVar("Result")
_MAX_ATTEMPTS = 5
_REMEMBERED_WRITES = 1000
# The other transaction of a deadlock takes milliseconds. Jitter keeps the two from colliding again.
_FIRST_RETRY_SECONDS, _LONGEST_RETRY_SECONDS = 0.01, 0.2
_WRITER = "foreshock-writer"
_CALLBACKS = "foreshock.after_commit"
_logger = logging.getLogger(__name__)


def after_commit(session: Session, callback: Callable[[], object]) -> None:
    """Call `callback` once the session's transaction is committed, in the thread of `Database.write` before it returns.

    The callback is dropped if the transaction rolls back. A crash may prevent it, so it may only do what may be lost
    then, such as a line of the log, or do early what a periodic task also does, such as waking a long poll.
    """
    session.info.setdefault(_CALLBACKS, []).append(callback)


class ReadOnly(RuntimeError):
    """A PostgreSQL server whose transactions may not write."""


class Database:
    """One database: PostgreSQL with a transaction for each unit of work, SQLite with one writer and many readers."""

    def __init__(
        self,
        url: str | URL,
        *,
        connections: int = engine.DEFAULT_CONNECTIONS,
        session_info: Mapping[str, object] = MappingProxyType({}),
    ) -> None:
        """Open the database; `session_info` is in the `info` of each session."""
        self.session_info = dict(session_info)
        self._write_engine = engine.make_engine(url, connections=connections)
        self.is_sqlite = self._write_engine.dialect.name == "sqlite"
        self._read_engine = engine.make_reading_engine(self._write_engine, connections=connections)
        self._writer = ThreadPoolExecutor(1, _WRITER) if self.is_sqlite else None
        # Beside the pool: work that holds a name needs connections of the pool, which other holders might keep.
        self._name_engine = engine.make_engine(url)
        # Of the newest writes, waiting included.
        self.write_seconds: deque[float] = deque(maxlen=_REMEMBERED_WRITES)

    @contextmanager
    def read(self) -> Iterator[Session]:
        """Open a session for reading; the loaded objects stay readable afterwards.

        Changes of these objects are not stored, and the database refuses statements that write.
        """
        with Session(self._read_engine, expire_on_commit=False, info=dict(self.session_info)) as session:
            try:
                yield session
            except BaseException:
                # A rollback would expire the loaded objects.
                session.expunge_all()
                raise
            session.expunge_all()
            try:
                # Not a rollback: after one psycopg prepares every statement again, as it may have undone a DDL.
                session.commit()
            except PendingRollbackError:
                # The connection was lost, and the caller ignored the error.
                session.rollback()

    def write(self, work: Callable[[Session], Result]) -> Result:
        """Run `work(session)` in a transaction and return its result after the commit.

        `work` runs again if PostgreSQL aborts it for a deadlock, so it must change nothing but the session. Raises the
        errors of `work`, after rolling back.
        """
        if threading.current_thread().name.startswith(_WRITER):
            raise RuntimeError("a unit of work must not start another one: pass it the session instead")
        begin = time.perf_counter()
        try:
            if self._writer is not None:
                result, session = self._writer.submit(self._write_directly, work).result()
            else:
                result, session = retry(
                    partial(self._write_directly, work),
                    Backoff(_FIRST_RETRY_SECONDS, _LONGEST_RETRY_SECONDS),
                    is_retryable=engine.is_retryable,
                    max_attempts=_MAX_ATTEMPTS,
                )
        finally:
            self.write_seconds.append(time.perf_counter() - begin)
        _run_callbacks(session)
        return result

    def check_writable(self) -> None:
        """Raise unless a transaction that writes can begin and commit."""
        if self.is_sqlite:
            # Writes the first page without changing it.
            self.write(lambda session: session.execute(text("PRAGMA user_version = 0")))
            return
        # Not the engine for reading, whose transactions are always read-only.
        with self._write_engine.connect() as connection:
            if connection.execute(text("SHOW transaction_read_only")).scalar_one() == "on":
                raise ReadOnly("the database is read-only")
            connection.commit()

    @contextmanager
    def exclusive(self, name: str) -> Iterator[bool]:
        """Hold this name during a `with` block and give True; give False if another process or thread holds it.

        For background work that one process at a time does. PostgreSQL releases the name when its connection ends, even
        after a crash. SQLite has one service process.
        """
        if self.is_sqlite:
            yield True
            return
        key = {"key": int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], signed=True)}
        with self._name_engine.connect() as connection:
            is_held = bool(connection.execute(text("SELECT pg_try_advisory_lock(:key)"), key).scalar_one())
            # The lock belongs to the connection; a transaction that stays open would keep old rows from vacuum.
            connection.commit()
            try:
                yield is_held
            finally:
                if is_held:
                    connection.execute(text("SELECT pg_advisory_unlock(:key)"), key)
                    connection.commit()

    def close(self) -> None:
        """Finish the queued writes and close every connection. One in use is closed when its thread returns it."""
        if self._writer is not None:
            self._writer.shutdown()
        for each in (self._write_engine, self._read_engine, self._name_engine):
            # `dispose` closes idle connections only; the others would return to a pool that nobody empties.
            event.listen(each.pool, "checkin", lambda connection, _: connection is not None and connection.close())
            each.dispose()

    def _write_directly(self, work: Callable[[Session], Result]) -> tuple[Result, Session]:
        session = Session(self._write_engine, expire_on_commit=False, info=dict(self.session_info))
        with session, session.begin():
            result = work(session)
        return result, session


def _run_callbacks(session: Session) -> None:
    """Run what `after_commit` registered; an error is logged, because the data is already committed."""
    for callback in session.info.pop(_CALLBACKS, []):
        try:
            callback()
        except Exception:
            _logger.exception("an after-commit callback failed")
