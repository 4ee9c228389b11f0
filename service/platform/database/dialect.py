"""SQL that differs between SQLite and PostgreSQL."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, cast

from sqlalchemy import CursorResult, Table, insert, text
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session

from foreshock_service.platform.database.prepared import Prepared
from foreshock_service.platform.database.tables.base import Base

Row = Mapping[str, Any]
_SERIALIZATION_FAILURE, _DEADLOCK = "40001", "40P01"


def insert_if_absent(session: Session, target: type[Base] | Table, row: Row) -> bool:
    """Insert a row unless one with an equal unique key exists; return whether it was inserted."""
    statement = _insert_if_absent(_dialect(session), table_of(target))
    # Without the option psycopg reports -1 rows for an INSERT.
    result = session.execute(statement, dict(row), execution_options={"preserve_rowcount": True})
    return cast("CursorResult[Any]", result).rowcount == 1


def insert_rows(session: Session, target: type[Base] | Table, rows: Sequence[Row]) -> None:
    """Insert rows that have the same columns; raises IntegrityError if a key exists."""
    if rows:
        _plain_insert(table_of(target), tuple(rows[0])).run(session, *rows)


def upsert(session: Session, target: type[Base] | Table, rows: Sequence[Row], key: Sequence[str]) -> None:
    """Insert rows, or overwrite every given column of the ones whose `key` exists. All rows have the same columns."""
    if rows:
        _upsert(_dialect(session), table_of(target), tuple(rows[0]), tuple(key)).run(session, *rows)


def database_now_us(session: Session) -> int:
    """Return the database's own time in UTC µs; the leases of several processes are compared with it."""
    if _dialect(session) == "sqlite":
        # SQLite reports milliseconds.
        query = "SELECT CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER) * 1000"
    else:
        query = "SELECT CAST(EXTRACT(EPOCH FROM clock_timestamp()) * 1000000 AS BIGINT)"
    return int(session.execute(text(query)).scalar_one())


def is_retryable(error: Exception) -> bool:
    """Return True if PostgreSQL aborted a transaction (deadlock, serialization failure) that can be run again."""
    return isinstance(error, OperationalError) and getattr(error.orig, "sqlstate", None) in (
        _SERIALIZATION_FAILURE,
        _DEADLOCK,
    )


def table_of(target: type[Base] | Table) -> Table:
    """Return the Table of a mapped class, or the Table itself."""
    return target if isinstance(target, Table) else cast(Table, target.__table__)


def _dialect(session: Session) -> str:
    return session.get_bind().dialect.name


# Built and compiled once: over the hundred columns of `measurements` that takes milliseconds.
@cache
def _plain_insert(table: Table, columns: tuple[str, ...]) -> Prepared:
    return Prepared(insert(table), columns)


@cache
def _insert_if_absent(dialect: str, table: Table) -> Any:
    return insert_for(dialect, table).on_conflict_do_nothing()


@cache
def _upsert(dialect: str, table: Table, columns: tuple[str, ...], key: tuple[str, ...]) -> Prepared:
    statement = insert_for(dialect, table)
    changed = {name: statement.excluded[name] for name in columns if name not in key}
    if not changed:
        return Prepared(statement.on_conflict_do_nothing(index_elements=key), columns)
    return Prepared(statement.on_conflict_do_update(index_elements=key, set_=changed), columns)


def insert_for(dialect: str, table: Table) -> Any:
    """Return an INSERT that can have an ON CONFLICT clause."""
    return sqlite.insert(table) if dialect == "sqlite" else postgresql.insert(table)
