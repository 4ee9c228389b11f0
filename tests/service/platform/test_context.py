"""The event bus: handlers run for exactly their type, in order, inside the transaction or after its commit."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
from sqlalchemy import text
from sqlalchemy.orm import Session

from foreshock_service.platform.context import EventBus
from foreshock_service.platform.database.session import Database, after_commit


@dataclass(frozen=True, slots=True)
class Happened:
    """An event."""

    number: int


@dataclass(frozen=True, slots=True)
class HappenedElsewhere(Happened):
    """An event of a derived type."""


@pytest.fixture
def database(tmp_path: Path) -> Database:
    """A database with an empty table `events`."""
    database = Database(f"sqlite:///{tmp_path}/events.db")
    database.write(lambda session: session.execute(text("CREATE TABLE events (number INTEGER)")) and None)
    return database


def store(session: Session, event: Happened) -> None:
    """Store the event in the publisher's transaction."""
    session.execute(text("INSERT INTO events VALUES (:number)"), {"number": event.number})


def stored(database: Database) -> list[int]:
    """Return the numbers of the stored events."""
    with database.read() as session:
        return list(session.scalars(text("SELECT number FROM events ORDER BY number")))


def test_handlers_of_exactly_the_type_run_and_those_after_the_commit_see_what_was_committed(database: Database) -> None:
    events, seen = EventBus(), []
    events.subscribe(Happened, store)
    for name in ("first", "second"):

        def look(session: Session, event: Happened, name: str = name) -> None:
            after_commit(session, lambda: seen.append((name, event.number, stored(database))))

        events.subscribe(Happened, look)
    database.write(lambda session: events.publish(session, HappenedElsewhere(1)))
    assert (seen, stored(database)) == ([], [])
    database.write(lambda session: events.publish(session, Happened(7)))
    assert seen == [("first", 7, [7]), ("second", 7, [7])]

    def fail(session: Session) -> None:
        events.publish(session, Happened(8))
        raise RuntimeError("the transaction fails")

    with pytest.raises(RuntimeError, match="fails"):
        database.write(fail)
    assert len(seen) == 2
