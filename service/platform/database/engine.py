"""Engines for SQLite (WAL, foreign keys, explicit BEGIN) and PostgreSQL (psycopg 3)."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
from pathlib import Path
from typing import Any, cast

import psycopg
from psycopg.types.numeric import Int8BinaryDumper
from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError

from foreshock.errors import ConfigurationError

_BUSY_TIMEOUT_MS = 30_000
DEFAULT_CONNECTIONS = 60
"""Connections of one process. PostgreSQL's own default allows 100 in all."""

_POOL_TIMEOUT_SECONDS = 10.0
# No other thread connects to a file before the descriptor that made it is closed.
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


def make_engine(text: str | URL, *, connections: int = DEFAULT_CONNECTIONS) -> Engine:
    """Return an engine for the database at a URL, with `connections` at most.

    On SQLite it takes the write lock when a transaction begins (BEGIN IMMEDIATE), so that it waits for other processes
    there and not in the middle.
    """
    url = parse_database_url(text)
    if url.get_backend_name() == "sqlite":
        engine = _make_sqlite_engine(url, connections)
        event.listen(engine, "begin", _begin_immediate)
        return engine
    engine = create_engine(url, pool_pre_ping=True, **_pool_options(connections))
    event.listen(engine, "connect", _prepare_postgresql_connection)
    event.listen(engine, "checkin", _allow_writing)
    return engine


def make_reading_engine(writing: Engine, *, connections: int = DEFAULT_CONNECTIONS) -> Engine:
    """Return an engine whose transactions the database of `writing` refuses to write in.

    On PostgreSQL it shares the connections of `writing`. On SQLite it has its own, sees a snapshot and takes no lock.
    """
    if writing.dialect.name == "sqlite":
        engine = _make_sqlite_engine(writing.url, connections)
        event.listen(engine, "connect", _refuse_writes)
        event.listen(engine, "begin", _begin_deferred)
        return engine
    engine = writing.execution_options()
    event.listen(engine, "begin", _begin_read_only)
    return engine


def _make_sqlite_engine(url: URL, connections: int) -> Engine:
    Path(str(url.database)).parent.mkdir(parents=True, exist_ok=True)
    engine = create_engine(url, **_pool_options(connections))
    event.listen(engine, "do_connect", _make_private_file)
    event.listen(engine, "connect", _prepare_sqlite_connection)
    return engine


def _pool_options(connections: int) -> dict[str, Any]:
    kept = min(20, connections)
    return {"pool_size": kept, "max_overflow": connections - kept, "pool_timeout": _POOL_TIMEOUT_SECONDS}


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
    # An answered request must survive a power cut; group commit shares the cost of the fsync.
    cursor.execute("PRAGMA synchronous = FULL")
    cursor.execute("PRAGMA foreign_keys = ON")
    cursor.close()


def _refuse_writes(connection: sqlite3.Connection, _: Any) -> None:
    connection.execute("PRAGMA query_only = ON").close()


def _prepare_postgresql_connection(connection: psycopg.Connection[Any], _: Any) -> None:
    # By default the type of an integer depends on its value, and with it the statement that the server has prepared.
    connection.adapters.register_dumper(int, Int8BinaryDumper)


def _begin_read_only(connection: Connection) -> None:
    # Until the connection goes back to the pool. The driver sends BEGIN with the first statement.
    cast("psycopg.Connection[Any]", connection.connection.driver_connection).read_only = True


def _allow_writing(connection: psycopg.Connection[Any] | None, _: Any) -> None:
    # None for one that was lost. Not False, which would go over the server's `default_transaction_read_only`.
    if connection is not None and not connection.closed and connection.read_only:
        connection.read_only = None


def _begin_immediate(connection: Connection) -> None:
    connection.exec_driver_sql("BEGIN IMMEDIATE")


def _begin_deferred(connection: Connection) -> None:
    connection.exec_driver_sql("BEGIN")
