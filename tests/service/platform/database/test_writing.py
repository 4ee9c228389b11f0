"""Units of work: a returned result is durable, a failing unit rolls back alone, many run at once."""

from __future__ import annotations

import contextlib
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
from sqlalchemy import event, func, select, text
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


def add_secret(session: Session, name: str, size: int) -> None:
    """Insert a row of `size` repetitions of the name of a key."""
    row = {"secret_hash": name * size, "key_id": f"key_{name}", "valid_until_us": 1}
    insert_rows(session, RetiredSecret, [row])


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


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_queued_units_share_one_commit(database: Database) -> None:
    commits = 0

    def count(_: object) -> None:
        nonlocal commits
        commits += 1

    event.listen(database._write_engine, "commit", count)
    entered, leave = threading.Event(), threading.Event()

    def hold(session: Session) -> str:
        entered.set()
        leave.wait(timeout=30)
        return add_key(session, "first")

    with ThreadPoolExecutor(11) as threads:
        first = threads.submit(database.write, hold)
        assert entered.wait(timeout=30)
        units = [partial(add_key, name=f"waits {number}") for number in range(10)]
        futures = [first, *(threads.submit(database.write, unit) for unit in units)]
        writer = database._writer
        assert writer is not None
        while writer._queue.qsize() < 10:
            pass
        leave.set()
        for future in futures:
            future.result(timeout=30)
    assert commits == 2
    assert len(names(database)) == 11


def wait_for_queue(database: Database, units: int) -> None:
    """Wait until so many units of work wait for the writer."""
    deadline = time.monotonic() + 30
    while database.writes_waiting < units:
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_units_that_share_a_transaction_with_one_that_raises_are_committed_once(database: Database) -> None:
    entered, leave = threading.Event(), threading.Event()
    after: list[int] = []

    def hold(_: Session) -> None:
        entered.set()
        leave.wait(timeout=30)

    def add(session: Session, number: int) -> str:
        after_commit(session, lambda: after.append(number))
        return add_key(session, f"key {number}", fail=number in (1, 4))

    with ThreadPoolExecutor(7) as threads:
        threads.submit(database.write, hold)
        assert entered.wait(timeout=30)
        futures = []
        for number in range(6):
            futures.append(threads.submit(database.write, partial(add, number=number)))
            wait_for_queue(database, number + 1)
        leave.set()
        outcomes = [future.exception(timeout=30) or future.result() for future in futures]
    assert [str(outcome) for outcome in outcomes] == ["key 0", "key 1 fails", "key 2", "key 3", "key 4 fails", "key 5"]
    assert names(database) == {"key 0", "key 2", "key 3", "key 5"}
    assert sorted(after) == [0, 2, 3, 5]


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_units_run_in_the_order_in_which_they_were_queued(database: Database) -> None:
    entered, leave = threading.Event(), threading.Event()
    ran: list[int] = []

    def hold(_: Session) -> None:
        entered.set()
        leave.wait(timeout=30)

    def note(_: Session, number: int) -> None:
        ran.append(number)

    with ThreadPoolExecutor(21) as threads:
        futures = [threads.submit(database.write, hold)]
        assert entered.wait(timeout=30)
        for number in range(20):
            # None of them has begun: the writer is held.
            futures.append(threads.submit(database.write, partial(note, number=number)))
            wait_for_queue(database, number + 1)
        assert not ran
        leave.set()
        for future in futures:
            future.result(timeout=30)
    assert ran == list(range(20))


def test_hooks_run_after_the_commit_and_not_after_a_rollback(database: Database) -> None:
    seen: list[set[str]] = []

    def work(session: Session, *, fail: bool) -> None:
        after_commit(session, lambda: seen.append(names(database)))
        add_key(session, "failed" if fail else "committed", fail=fail)

    database.write(lambda session: work(session, fail=False))
    with pytest.raises(ValueError, match="fails"):
        database.write(lambda session: work(session, fail=True))
    assert seen == [{"committed"}]


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


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_units_that_share_a_transaction_with_one_that_fills_the_disk_keep_their_rows(database: Database) -> None:
    entered, leave = threading.Event(), threading.Event()

    def hold(session: Session) -> None:
        # SQLite ends the whole transaction of the statement that finds no room.
        pages = session.execute(text("PRAGMA page_count")).scalar_one()
        session.execute(text(f"PRAGMA max_page_count = {pages + 50}"))
        entered.set()
        leave.wait(timeout=30)

    def add(session: Session, name: str, size: int) -> str:
        after_commit(session, lambda: after.append(name))
        add_key(session, name)
        insert_rows(
            session, RetiredSecret, [{"secret_hash": name * size, "key_id": f"key_{name}", "valid_until_us": 1}]
        )
        return name

    after: list[str] = []
    units = [("small", 10), ("large", 400_000), ("next", 10), ("larger", 500_000), ("last", 10)]
    with ThreadPoolExecutor(6) as threads:
        threads.submit(database.write, hold)
        assert entered.wait(timeout=30)
        futures = []
        for number, (name, size) in enumerate(units):
            futures.append(threads.submit(database.write, partial(add, name=name, size=size)))
            wait_for_queue(database, number + 1)
        leave.set()
        errors = [future.exception(timeout=30) for future in futures]
    stored = {name for (name, _), error in zip(units, errors, strict=True) if error is None}
    assert stored == names(database) == set(after) == {"small", "next", "last"}
    assert all("database or disk is full" in str(error) for error in errors if error is not None)


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_a_unit_that_goes_on_after_sqlite_ended_its_transaction_is_not_acknowledged(database: Database) -> None:
    def go_on(session: Session) -> None:
        add_key(session, "lost")
        pages = session.execute(text("PRAGMA page_count")).scalar_one()
        session.execute(text(f"PRAGMA max_page_count = {pages + 10}"))
        with contextlib.suppress(OperationalError):
            insert_rows(
                session, RetiredSecret, [{"secret_hash": "a" * 1_000_000, "key_id": "key_lost", "valid_until_us": 1}]
            )

    with pytest.raises(OperationalError, match="rolled the transaction back"):
        database.write(go_on)
    assert names(database) == set()
