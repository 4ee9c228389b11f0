"""Engines for SQLite (WAL, explicit BEGIN) and PostgreSQL (psycopg 3), and SQL that differs between them."""

import contextlib
import os
import sqlite3
import threading
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, cast

import psycopg
from psycopg.types.numeric import Int8BinaryDumper
from sqlalchemy import ColumnElement, Connection, CursorResult, Engine, Table, and_, create_engine, event, insert, text
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, OperationalError
from sqlalchemy.orm import Session

from foreshock.errors import ConfigurationError
from foreshock_service.platform.database.tables import Base

_BUSY_TIMEOUT_MS = 30_000
DEFAULT_CONNECTIONS = 60
"""Connections of one process. PostgreSQL's own default allows 100 in all."""

_POOL_TIMEOUT_SECONDS = 10.0
# No other thread may connect to a new database file before the descriptor that made it is closed.
_making_file = threading.Lock()


def parse_database_url(text: str | URL) -> URL:
    """Return the URL with its driver spelled out; raises ConfigurationError for a database that is not supported."""
    try:
        url = make_url(text)
    except ArgumentError as error:
        raise ConfigurationError("FORESHOCK_DATABASE_URL is not a URL such as sqlite:///./foreshock.db") from error
    if url.get_backend_name() == "postgresql":
        return url.set(drivername="postgresql+psycopg")
    if url.get_backend_name() == "sqlite":
        if url.database in (None, "", ":memory:"):
            raise ConfigurationError("FORESHOCK_DATABASE_URL must name a file: sqlite:///./foreshock-data/foreshock.db")
        return url.set(drivername="sqlite+pysqlite")
    raise ConfigurationError(f"FORESHOCK_DATABASE_URL: {url.get_backend_name()} is neither sqlite nor postgresql")


def make_engine(text: str | URL, *, connections: int = DEFAULT_CONNECTIONS, begin: str = "BEGIN IMMEDIATE") -> Engine:
    """Return an engine for the database at a URL, with `connections` at most.

    On SQLite a transaction begins with `begin` and takes the write lock there, so that it waits for other processes
    then and not in the middle.
    """
    url = parse_database_url(text)
    kept = min(20, connections)
    pool = {"pool_size": kept, "max_overflow": connections - kept, "pool_timeout": _POOL_TIMEOUT_SECONDS}
    if url.get_backend_name() == "postgresql":
        engine = create_engine(url, pool_pre_ping=True, **pool)
        # By default psycopg chooses an integer's type by its value, so that the server prepares several statements.
        event.listen(engine, "connect", lambda raw, _: raw.adapters.register_dumper(int, Int8BinaryDumper))
        event.listen(engine, "checkin", _allow_writing)
        return engine
    Path(str(url.database)).parent.mkdir(parents=True, exist_ok=True)
    engine = create_engine(url, **pool)
    event.listen(engine, "do_connect", _make_private_file)
    event.listen(engine, "connect", _prepare_sqlite_connection)
    event.listen(engine, "begin", lambda connection: connection.exec_driver_sql(begin))
    event.listen(engine, "commit", check_transaction)
    return engine


def make_reading_engine(writing: Engine, *, connections: int = DEFAULT_CONNECTIONS) -> Engine:
    """Return an engine for the database of `writing`; the database refuses writes in its transactions.

    On PostgreSQL it shares the connections of `writing`. On SQLite it has its own, sees a snapshot and takes no lock.
    """
    if writing.dialect.name == "sqlite":
        engine = make_engine(writing.url, connections=connections, begin="BEGIN")
        event.listen(engine, "connect", lambda connection, _: connection.execute("PRAGMA query_only = ON").close())
        return engine
    engine = writing.execution_options()
    event.listen(engine, "begin", _begin_read_only)
    return engine


def _make_private_file(_dialect: Any, _record: Any, arguments: list[Any], _options: Any) -> None:
    """Make a missing database file, which holds names of runs and hashes of keys, readable by its user only.

    SQLite gives its -wal, -shm and -journal the mode of the main file. A file that exists keeps its mode, and is never
    opened here: closing it would end the locks of this process's connections to it. Failures are left to SQLite.
    """
    with _making_file, contextlib.suppress(OSError):
        os.close(os.open(arguments[0], os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))


def _prepare_sqlite_connection(connection: sqlite3.Connection, _: Any) -> None:
    # sqlite3 would otherwise begin transactions by itself, too late for SAVEPOINT and for DDL.
    connection.isolation_level = None
    cursor = connection.cursor()
    cursor.execute(f"PRAGMA busy_timeout = {_BUSY_TIMEOUT_MS}")
    cursor.execute("PRAGMA journal_mode = WAL")
    # An answered request must survive a power cut.
    cursor.execute("PRAGMA synchronous = FULL")
    cursor.execute("PRAGMA foreign_keys = ON")
    cursor.close()


def _begin_read_only(connection: Connection) -> None:
    # Holds until the connection returns to the pool. The driver sends BEGIN with the first statement.
    cast("psycopg.Connection[Any]", connection.connection.driver_connection).read_only = True


def _allow_writing(connection: psycopg.Connection[Any] | None, _: Any) -> None:
    # A lost connection is None. `read_only` False would override the server's `default_transaction_read_only`.
    if connection is not None and not connection.closed and connection.read_only:
        connection.read_only = None


class TransactionEnded(OperationalError):
    """SQLite has rolled a transaction back by itself, as it does at an error of a full or failing disk."""


def check_transaction(connection: Connection) -> None:
    """Raise TransactionEnded if SQLite has ended the transaction: a commit would store nothing and raise nothing."""
    if not cast("sqlite3.Connection", connection.connection.driver_connection).in_transaction:
        reason = sqlite3.OperationalError("SQLite has rolled the transaction back at an error")
        raise TransactionEnded("COMMIT", {}, reason)


Row = Mapping[str, Any]
_RETRYABLE = ("40001", "40P01")  # a serialization failure, a deadlock


def insert_if_absent(session: Session, target: type[Base] | Table, row: Row) -> bool:
    """Insert a row unless one with an equal unique key exists; return whether it was inserted."""
    statement = insert_for(session, table_of(target)).on_conflict_do_nothing()
    # Without the option psycopg reports -1 rows for an INSERT.
    result = session.execute(statement, dict(row), execution_options={"preserve_rowcount": True})
    return cast("CursorResult[Any]", result).rowcount == 1


def insert_rows(session: Session, target: type[Base] | Table, rows: Sequence[Row]) -> None:
    """Insert rows that have the same columns; raises IntegrityError if a key exists."""
    if rows:
        session.execute(insert(table_of(target)), list(rows))


def upsert(session: Session, target: type[Base] | Table, rows: Sequence[Row], key: Sequence[str]) -> None:
    """Insert rows; if the `key` of one exists, overwrite every given column. All rows have the same columns."""
    if rows:
        dialect = session.get_bind().dialect.name
        session.execute(_upsert(dialect, table_of(target), tuple(rows[0]), tuple(key)), list(rows))


def of_step(table: Any, step: Any) -> ColumnElement[bool]:
    """Return the condition that a table's row belongs to `step`: a key, a row, or a table to join with."""
    return and_(table.run_id == step.run_id, table.attempt == step.attempt, table.step == step.step)


def database_now_us(session: Session) -> int:
    """Return the database's own time in UTC µs; the leases of several processes are compared with it."""
    if session.get_bind().dialect.name == "sqlite":
        # SQLite reports milliseconds.
        query = "SELECT CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER) * 1000"
    else:
        query = "SELECT CAST(EXTRACT(EPOCH FROM clock_timestamp()) * 1000000 AS BIGINT)"
    return int(session.execute(text(query)).scalar_one())


def is_retryable(error: Exception) -> bool:
    return isinstance(error, OperationalError) and getattr(error.orig, "sqlstate", None) in _RETRYABLE


def table_of(target: type[Base] | Table) -> Table:
    return target if isinstance(target, Table) else cast(Table, target.__table__)


# Cached: for the hundred columns of `measurements` the statement takes 13 ms to build and 0.4 ms to execute.
@cache
def _upsert(dialect: str, table: Table, columns: tuple[str, ...], key: tuple[str, ...]) -> Any:
    statement = _insert(dialect, table)
    changed = {name: statement.excluded[name] for name in columns if name not in key}
    if not changed:
        return statement.on_conflict_do_nothing(index_elements=key)
    return statement.on_conflict_do_update(index_elements=key, set_=changed)


def insert_for(session: Session, table: Table) -> Any:
    return _insert(session.get_bind().dialect.name, table)


# Cached: a statement keeps its `excluded` columns, which take 1 ms to make for a table of ten columns.
@cache
def _insert(dialect: str, table: Table) -> Any:
    return sqlite.insert(table) if dialect == "sqlite" else postgresql.insert(table)
