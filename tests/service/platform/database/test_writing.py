"""Units of work: a returned result is durable, a failing unit rolls back alone, many run at once."""

from __future__ import annotations

import contextlib
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
from sqlalchemy import func, select, text
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session

from foreshock.clock import now_us
from foreshock_service.platform.database.engine import database_now_us, insert_if_absent, insert_rows, upsert
from foreshock_service.platform.database.session import Database, after_commit
from foreshock_service.platform.database.tables import ApiKey, RetiredSecret


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
    """Return the names of all keys."""
    with database.read() as session:
        return set(session.scalars(select(ApiKey.name)))


def test_written_row_can_be_read_after_write_returns(database: Database) -> None:
    assert database.write(lambda session: add_key(session, "one")) == "one"
    assert names(database) == {"one"}


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


def test_an_error_of_the_database_rolls_back_alone(database: Database) -> None:
    def broken(session: Session) -> None:
        add_key(session, "lost")
        session.execute(select(func.no_such_function()))

    with pytest.raises(Exception, match="no_such_function"):
        database.write(broken)
    database.write(lambda session: add_key(session, "kept"))
    assert names(database) == {"kept"}


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
