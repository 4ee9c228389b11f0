"""Prepared statements go to the driver, with the errors of SQLAlchemy, and as events if something listens."""

from __future__ import annotations

import pytest
from sqlalchemy import bindparam, event, select, text
from sqlalchemy.exc import IntegrityError, OperationalError
from sqlalchemy.orm import Session

from foreshock_service.platform.database.dialect import insert_rows, table_of
from foreshock_service.platform.database.prepared import Prepared
from foreshock_service.platform.database.session import Database
from foreshock_service.platform.database.tables import ApiKey

_keys = table_of(ApiKey).c
_NAME = Prepared(select(_keys.name).where(_keys.id == bindparam("id")))


def add(session: Session, *names: str) -> None:
    """Insert keys, each under its name."""
    rows = [{"id": name, "name": name, "scopes": ["read"], "secret_hash": name, "created_at_us": 1} for name in names]
    insert_rows(session, ApiKey, rows)


def name_of(database: Database, key: str) -> tuple[str, ...] | None:
    """Return the row of a key, by a prepared query."""
    with database.read() as session:
        return _NAME.first(session, {"id": key})


@pytest.mark.parametrize("names", [("one",), ("one", "two")], ids=["one row", "two rows"])
def test_an_error_of_the_driver_is_one_of_sqlalchemy(database: Database, names: tuple[str, ...]) -> None:
    database.write(lambda session: add(session, *names))
    with pytest.raises(IntegrityError) as raised:
        database.write(lambda session: add(session, *names))
    assert "INSERT INTO api_keys" in str(raised.value.statement)
    assert name_of(database, "one") == ("one",)
    database.write(lambda session: add(session, "three"))
    assert name_of(database, "three") == ("three",)


def test_each_transaction_of_a_session_has_a_connection_of_its_own(database: Database) -> None:
    with database.read() as session:
        assert _NAME.first(session, {"id": "one"}) is None
        first = session.connection()
        session.rollback()
        assert first.closed
        database.write(lambda writing: add(writing, "one"))
        assert _NAME.first(session, {"id": "one"}) == ("one",)


def test_what_listens_is_told(database: Database) -> None:
    seen = []
    with database.read() as session:
        event.listen(session.connection(), "before_cursor_execute", lambda *call: seen.append(call[2]))
        assert _NAME.first(session, {"id": "none"}) is None
    assert len(seen) == 1
    assert name_of(database, "none") is None


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
def test_a_lost_connection_is_replaced(database: Database) -> None:
    with database.read() as session:
        process = session.execute(text("SELECT pg_backend_pid()")).scalar_one()
        with database.read() as other:
            other.execute(text("SELECT pg_terminate_backend(CAST(:process AS INTEGER))"), {"process": process})
        with pytest.raises(OperationalError) as raised:
            _NAME.first(session, {"id": "none"})
    assert raised.value.connection_invalidated
    assert name_of(database, "none") is None
