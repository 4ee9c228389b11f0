"""What the database engines of one process of tests need not do again, or at all.

Each test has engines of its own, and would compile every statement anew; an upsert of measurements alone takes 13 ms.
A commit that waits for the disk takes 7 ms on SQLite, and no test loses its power; PostgreSQL's cluster does not wait
either.
"""

import sqlite3
from typing import Any

from sqlalchemy import Engine
from sqlalchemy.dialects.postgresql.psycopg import PGDialect_psycopg
from sqlalchemy.dialects.sqlite.pysqlite import SQLiteDialect_pysqlite
from sqlalchemy.util import LRUCache

from foreshock_service.platform.database import engine as product


def spare_engines() -> None:
    """Let all engines of this process share compiled statements, and SQLite's not wait for the disk."""
    for dialect in (SQLiteDialect_pysqlite, PGDialect_psycopg):
        _share_statements(dialect)
    prepare = product._prepare_sqlite_connection

    def prepare_without_syncs(connection: sqlite3.Connection, _: Any) -> None:
        prepare(connection, _)
        connection.execute("PRAGMA synchronous = OFF").close()

    product._prepare_sqlite_connection = prepare_without_syncs


def _share_statements(dialect: Any) -> None:
    """Give all engines of a dialect one cache. Its keys hold the dialect, which is equal for engines made alike."""
    compiled: LRUCache[Any, Any] = LRUCache(2000)

    def engine_created(_: type, engine: Engine) -> None:
        engine._compiled_cache = compiled

    dialect.engine_created = classmethod(engine_created)
    dialect.__hash__ = lambda self: hash(type(self))
    dialect.__eq__ = lambda self, other: type(self) is type(other)
