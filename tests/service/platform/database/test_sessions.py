"""Reads store nothing; a written result is durable, a failing unit of work rolls back alone, many run at once."""

import contextlib
import sqlite3
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
from sqlalchemy import func, insert, select, text
from sqlalchemy.exc import DBAPIError, OperationalError
from sqlalchemy.orm import Session

from foreshock.clock import now_us
from foreshock_service.platform.database.engine import database_now_us, insert_if_absent, insert_rows, upsert
from foreshock_service.platform.database.session import Database, after_commit
from foreshock_service.platform.database.tables import ApiKey, EndedSession, RetiredSecret

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
    assert row.expires_at_us == 2, "it stays readable"
    with database.read() as session:
        assert session.scalars(select(EndedSession)).one().expires_at_us == 1


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


def add_key(session: Session, name: str, *, fail: bool = False) -> str:
    """Insert a row; with `fail`, raise afterwards."""
    row = {
        "id": f"key_{name}", "name": name, "project": None, "scopes": ["read"], "secret_hash": name,
        "created_at_us": 1, "revoked_at_us": None,
    }  # fmt: skip
    assert insert_if_absent(session, ApiKey, row)
    if fail:
        raise ValueError(f"{name} fails")
    return name


def names(database: Database) -> set[str]:
    with database.read() as session:
        return set(session.scalars(select(ApiKey.name)))


def test_a_unit_that_raises_rolls_back_alone(database: Database) -> None:
    def attempt(number: int) -> bool:
        try:
            database.write(lambda session: add_key(session, f"key {number}", fail=number % 3 == 0))
        except ValueError:
            return False
        return True

    with ThreadPoolExecutor(8) as threads:
        stored = list(threads.map(attempt, range(60)))
    assert stored == [number % 3 != 0 for number in range(60)]
    assert names(database) == {f"key {number}" for number in range(60) if number % 3 != 0}


def allow_pages(session: Session, more: int) -> None:
    """Leave room for so many pages; SQLite ends the whole transaction of a statement that finds none."""
    pages = session.execute(text("PRAGMA page_count")).scalar_one()
    session.execute(text(f"PRAGMA max_page_count = {pages + more}"))


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_units_run_one_after_the_other(database: Database) -> None:
    running, most = Counter[str](), 0

    def add(session: Session, number: int) -> str:
        nonlocal most
        running["units"] += 1
        name = add_key(session, f"key {number}")
        most = max(most, running["units"])
        running["units"] -= 1
        return name

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda number: database.write(partial(add, number=number)), range(40)))
    assert (most, len(names(database))) == (1, 40)


def test_only_what_is_committed_is_followed_by_its_callback(database: Database) -> None:
    after: list[int] = []

    def add(session: Session, number: int) -> None:
        after_commit(session, lambda: after.append(number))
        add_key(session, f"key {number}", fail=number == 1)

    for number in range(3):
        with contextlib.suppress(ValueError):
            database.write(partial(add, number=number))
    assert after == [0, 2]


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_nested_unit_is_refused_without_a_deadlock(database: Database) -> None:
    with pytest.raises(RuntimeError, match="must not start another"):
        database.write(lambda _: database.write(lambda session: add_key(session, "inner")))


def test_upsert_overwrites_rows_with_the_same_key(database: Database) -> None:
    rows: list[dict[str, Any]] = [
        {"id": f"key_{n}", "name": "old", "project": None, "scopes": [], "secret_hash": str(n), "created_at_us": n}
        for n in range(3)
    ]
    database.write(lambda session: upsert(session, ApiKey, rows, ["id"]))
    newer = [row | {"name": "new"} for row in rows[1:]]
    database.write(lambda session: upsert(session, ApiKey, newer, ["id"]))
    with database.read() as session:
        found = {row.id: row.name for row in session.execute(select(ApiKey.id, ApiKey.name))}
    assert found == {"key_0": "old", "key_1": "new", "key_2": "new"}


def test_database_time_equals_local_time(database: Database) -> None:
    with database.read() as session:
        assert abs(database_now_us(session) - now_us()) < 5_000_000


def add_large_key(session: Session, name: str, size: int) -> str:
    """Insert a key, and a row of `size` times its name."""
    add_key(session, name)
    insert_rows(session, RetiredSecret, [{"secret_hash": name * size, "key_id": f"key_{name}", "valid_until_us": 1}])
    return name


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_a_unit_that_fills_the_disk_is_lost_alone(database: Database) -> None:
    def fill(session: Session) -> None:
        allow_pages(session, 50)
        add_large_key(session, "large", 400_000)

    database.write(lambda session: add_key(session, "before"))
    with pytest.raises(OperationalError, match="database or disk is full"):
        database.write(fill)
    database.write(lambda session: add_key(session, "after"))
    assert names(database) == {"before", "after"}


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_a_unit_that_goes_on_after_sqlite_ended_its_transaction_is_not_acknowledged(database: Database) -> None:
    def go_on(session: Session) -> None:
        allow_pages(session, 10)
        with contextlib.suppress(OperationalError):
            add_large_key(session, "lost", 400_000)

    with pytest.raises(OperationalError, match="rolled the transaction back"):
        database.write(go_on)
    assert names(database) == set()
