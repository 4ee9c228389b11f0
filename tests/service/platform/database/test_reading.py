"""`Database.read`: what it stores (nothing), what it leaves to the connection's next user, and what it costs."""

from __future__ import annotations

import sqlite3

import pytest
from sqlalchemy import func, insert, select, text
from sqlalchemy.exc import DBAPIError, OperationalError
from sqlalchemy.orm import Session

from foreshock_service.platform.database.session import Database
from foreshock_service.platform.database.tables import EndedSession

ROW = {"session_hash": "abc", "expires_at_us": 1}


def count(database: Database) -> int | None:
    with database.read() as session:
        return session.scalar(select(func.count()).select_from(EndedSession))


def store(session: Session) -> None:
    session.execute(insert(EndedSession).values(ROW))


def test_statements_that_write_are_refused(database: Database) -> None:
    with pytest.raises(DBAPIError, match=r"read-?only"), database.read() as session:
        store(session)
    assert count(database) == 0


def test_changes_of_objects_are_not_stored(database: Database) -> None:
    database.write(store)
    with database.read() as session:
        row = session.scalars(select(EndedSession)).one()
        row.expires_at_us = 2
    with database.read() as session:
        assert session.scalars(select(EndedSession)).one().expires_at_us == 1


def test_objects_stay_readable_after_it(database: Database) -> None:
    database.write(store)
    with database.read() as session:
        row = session.scalars(select(EndedSession)).one()
    assert row.expires_at_us == 1


def test_connection_can_write_after_an_error_in_it(database: Database) -> None:
    with pytest.raises(DBAPIError), database.read() as session:
        session.execute(text("SELECT missing"))
    database.write(store)
    assert count(database) == 1


def test_writing_obeys_a_server_that_is_read_only_by_default(migrated_postgres: str) -> None:
    database = Database(f"{migrated_postgres}&options=-cdefault_transaction_read_only%3Don", connections=1)
    try:
        assert count(database) == 0
        with pytest.raises(DBAPIError, match="read-only transaction"):
            database.write(store)
    finally:
        database.close()


def test_statements_stay_prepared_between_units_of_work(migrated_postgres: str) -> None:
    database = Database(migrated_postgres, connections=1)

    def prepared() -> set[str]:
        with database.read() as session:
            return set(session.scalars(text("SELECT name FROM pg_prepared_statements")))

    try:
        for _ in range(10):
            database.write(lambda session: session.scalar(select(func.count()).select_from(EndedSession)))
        before = prepared()
        assert before
        assert count(database) == 0
        assert before <= prepared()
    finally:
        database.close()


def test_integers_of_every_size_use_one_prepared_statement(migrated_postgres: str) -> None:
    database = Database(migrated_postgres, connections=1)
    try:
        with database.read() as session:
            for number in (1, 40_000, 3_000_000_000):
                for _ in range(10):
                    session.execute(select(func.count()).where(EndedSession.expires_at_us == number))
            types = session.scalars(text("SELECT parameter_types::text FROM pg_prepared_statements")).all()
        assert types == ["{bigint}"]
    finally:
        database.close()


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
def test_a_lost_connection_is_replaced(database: Database) -> None:
    with database.read() as session:
        process = session.execute(text("SELECT pg_backend_pid()")).scalar_one()
        with database.read() as other:
            other.execute(text("SELECT pg_terminate_backend(CAST(:process AS INTEGER))"), {"process": process})
        with pytest.raises(OperationalError) as raised:
            session.execute(text("SELECT 1"))
    assert raised.value.connection_invalidated
    assert count(database) == 0


def test_connection_that_is_in_use_when_the_database_closes_is_closed_when_it_comes_back(database_url: str) -> None:
    database = Database(database_url)
    with database.read() as session:
        connection = session.connection().connection.driver_connection
        assert connection is not None
        database.close()
        assert session.scalar(select(func.count()).select_from(EndedSession)) == 0
    if isinstance(connection, sqlite3.Connection):
        with pytest.raises(sqlite3.ProgrammingError, match="closed"):
            connection.execute("SELECT 1")
    else:
        assert connection.closed
