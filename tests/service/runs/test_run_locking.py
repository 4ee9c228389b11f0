"""A locked run is an object of the session, loaded anew, whose changes are stored."""

from __future__ import annotations

from sqlalchemy import update
from sqlalchemy.orm import Session

from foreshock_service.platform.database.session import Database
from foreshock_service.platform.database.tables import Run
from foreshock_service.runs.runs import lock_run_for_background


def add_run(session: Session) -> None:
    """Add a run with names of its scalars."""
    session.add(
        Run(
            id="run_a",
            project="team",
            key="nightly",
            name="first",
            advice_mode="shadow",
            state="running",
            scalar_names={"reward": "score"},
            created_at_us=1,
            updated_at_us=1,
        )
    )


def test_a_run_that_was_read_before_is_refreshed_by_its_lock(database: Database) -> None:
    database.write(add_run)

    def lock_after_reading(session: Session) -> tuple[bool, str | None]:
        before = session.get(Run, "run_a")
        session.connection().execute(update(Run).values(name="changed below the session"))
        run = lock_run_for_background(session, "run_a")
        assert run is not None
        return run is before, run.name

    assert database.write(lock_after_reading) == (True, "changed below the session")


def test_there_is_nothing_to_lock_without_the_run(database: Database) -> None:
    assert database.write(lambda session: lock_run_for_background(session, "run_a")) is None
