"""The one place that knows what SQLite and PostgreSQL say differently."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from sqlalchemy import CursorResult, Table, text
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session

from service.platform.database.tables.base import Base

Row = Mapping[str, Any]
_SERIALIZATION_FAILURE, _DEADLOCK = "40001", "40P01"
# SQLite's default limit of bound parameters in a statement.
_MOST_PARAMETERS = 30_000


def insert_if_absent(session: Session, target: type[Base] | Table, row: Row) -> bool:
    """Insert a row unless one with an equal unique key is there; whether it was inserted."""
    statement = _insert(session, table_of(target)).values(**row).on_conflict_do_nothing()
    # Without the option psycopg's count of an INSERT is gone (-1) by the time it is asked for.
    result = session.execute(statement, execution_options={"preserve_rowcount": True})
    return cast("CursorResult[Any]", result).rowcount == 1


def upsert(session: Session, target: type[Base] | Table, rows: Sequence[Row], key: Sequence[str]) -> None:
    """Insert rows, or overwrite every given column of the ones whose `key` exists. All rows have the same columns."""
    if not rows:
        return
    table = table_of(target)
    columns = list(rows[0])
    size = max(1, _MOST_PARAMETERS // len(columns))
    for start in range(0, len(rows), size):
        statement = _insert(session, table).values([dict(row) for row in rows[start : start + size]])
        changed = {name: statement.excluded[name] for name in columns if name not in key}
        if changed:
            session.execute(statement.on_conflict_do_update(index_elements=list(key), set_=changed))
        else:
            session.execute(statement.on_conflict_do_nothing(index_elements=list(key)))


def database_now_us(session: Session) -> int:
    """The database's own time in UTC microseconds: what leases of several processes compare."""
    if session.get_bind().dialect.name == "sqlite":
        # Milliseconds are all that SQLite tells.
        query = "SELECT CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER) * 1000"
    else:
        query = "SELECT CAST(EXTRACT(EPOCH FROM clock_timestamp()) * 1000000 AS BIGINT)"
    return int(session.execute(text(query)).scalar_one())


def is_retryable(error: Exception) -> bool:
    """True if PostgreSQL aborted a transaction (deadlock, serialization failure) that can be run again."""
    return isinstance(error, OperationalError) and getattr(error.orig, "sqlstate", None) in (
        _SERIALIZATION_FAILURE,
        _DEADLOCK,
    )


def table_of(target: type[Base] | Table) -> Table:
    """The Table of a mapped class, or the Table itself."""
    return target if isinstance(target, Table) else cast(Table, target.__table__)


def _insert(session: Session, table: Table) -> Any:
    if session.get_bind().dialect.name == "sqlite":
        return sqlite.insert(table)
    return postgresql.insert(table)
