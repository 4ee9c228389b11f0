"""Late data of a long run is replayed outside the writer, with the result of a history that was never different."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event, select
from sqlalchemy.engine import Engine
from sqlalchemy.orm import Session

from foreshock_service.app import subscribe_handlers
from foreshock_service.platform.database.session import Database
from foreshock_service.platform.database.tables import DueReplay
from foreshock_service.platform.events import EventBus
from foreshock_service.watch.detection import late_replays, replay_detectors
from foreshock_service.watch.detection.events import ReplayDue
from foreshock_service.watch.detection.late_replays import make_due_replay
from foreshock_service.watch.detection.replay_detectors import STEPS_IN_TRANSACTION
from foreshock_service.watch.detection.states import MILESTONE_STEPS, RECENT_STATES
from tests.service.watch.recorded import K3, LENGTH, RecordedRun

STEPS = 3 * STEPS_IN_TRANSACTION


def values_at(step: int) -> dict[str, float]:
    """Return a history with a surge of the lengths, and a critical mismatch for a while."""
    surge = 2.5 if step > STEPS // 2 else 1.0
    return {LENGTH: surge * (100.0 + math.sin(step)), K3: 2e-2 if 60 < step < 90 else 1e-4 * (1 + step % 3)}


def outcome(run: RecordedRun) -> tuple[list[Any], list[Any]]:
    """Return what the detectors made of a run: its alerts, and its snapshots with the newest state."""
    alerts = [
        (alert.rule, alert.step, alert.value, alert.evidence, alert.cleared_step, alert.state)
        for alert in run.alerts()
        if alert.state != "retracted"
    ]
    snapshots = [(each.step, each.attempt, each.milestone, each.state) for each in run.snapshots()]
    return alerts, [*snapshots, run.newest_state()]


def due(database: Database) -> list[str]:
    with database.read() as session:
        return list(session.scalars(select(DueReplay.run_id)))


def closed_run(
    database: Database, key: str, changed: Mapping[int, Mapping[str, float]], steps: int = STEPS
) -> RecordedRun:
    """Return a run that closed every step, in which some first had other values."""
    run = RecordedRun(database).begin(key)
    for step in range(1, steps + 1):
        run.close(step, changed.get(step) or values_at(step))
    return run


@pytest.fixture
def sqlite_database(sqlite_template: Path, tmp_path: Path) -> Iterator[Database]:
    """A database for long histories: closing hundreds of steps takes seconds."""
    shutil.copy(sqlite_template, tmp_path / "foreshock.db")
    database = Database(f"sqlite:///{tmp_path}/foreshock.db")
    yield database
    database.close()


def test_late_data_gives_the_result_of_a_history_that_was_never_different(database: Database) -> None:
    expected = outcome(closed_run(database, "in order", {}))
    late = closed_run(database, "late", {2: {LENGTH: 900.0, K3: 3e-2}, 3: {LENGTH: 900.0, K3: 3e-2}})
    assert outcome(late) != expected
    for step in (3, 2):
        late.close(step, values_at(step))
    assert outcome(late) == expected
    assert due(database) == []
    late.close(STEPS + 1, values_at(STEPS + 1))
    assert late.snapshots()[-1].step == STEPS + 1


def test_replay_that_a_crash_prevented_is_made_later(database: Database) -> None:
    expected = outcome(closed_run(database, "in order", {}))
    late = closed_run(database, "late", {2: {LENGTH: 900.0}})
    handlers, late.events = late.events, EventBus()
    subscribe_without(late.events, ReplayDue)
    late.close(2, values_at(2))
    assert due(database) == [late.run]
    assert outcome(late) != expected
    assert make_due_replay(handlers, late.run, database)
    assert outcome(late) == expected
    assert due(database) == []


def test_change_during_a_replay_repeats_it(database: Database) -> None:
    expected = outcome(closed_run(database, "in order", {}))
    late = closed_run(database, "late", {2: {LENGTH: 900.0}, 4: {LENGTH: 900.0}})
    handlers, late.events = late.events, EventBus()
    subscribe_without(late.events, ReplayDue)
    late.close(2, values_at(2))
    racing = Racing(database, lambda: late.close(4, values_at(4)))
    assert make_due_replay(handlers, late.run, racing)  # type: ignore[arg-type]
    assert racing.writes == 2
    assert outcome(late) == expected


def test_steps_that_close_during_a_replay_are_replayed_with_it(database: Database) -> None:
    expected = outcome(closed_run(database, "in order", {}, STEPS + 2))
    late = closed_run(database, "late", {2: {LENGTH: 900.0}})
    handlers, late.events = late.events, EventBus()
    subscribe_without(late.events, ReplayDue)
    late.close(2, values_at(2))

    def close_two() -> None:
        for step in (STEPS + 1, STEPS + 2):
            late.close(step, values_at(step))

    racing = Racing(database, close_two)
    assert make_due_replay(handlers, late.run, racing)  # type: ignore[arg-type]
    assert racing.writes == 1
    assert outcome(late) == expected


def test_replay_ends_where_the_states_are_the_stored_ones_again(sqlite_database: Database) -> None:
    steps = 450
    expected = outcome(closed_run(sqlite_database, "in order", {}, steps))
    # A surge and an alert that clears lie within the replay; k3 of the late step fires nothing.
    late = closed_run(sqlite_database, "late", {20: {LENGTH: 140.0, K3: 1e-4}}, steps)
    with statements() as seen:
        late.close(20, values_at(20))
    assert outcome(late) == expected
    written = sum(rows for statement, rows in seen if statement.startswith("INSERT INTO detector_snapshots"))
    assert 0 < written < steps // MILESTONE_STEPS
    assert due(sqlite_database) == []
    late.close(steps + 1, values_at(steps + 1))
    assert late.snapshots()[-1].step == steps + 1


def test_replay_of_a_long_history_keeps_few_states_and_has_the_same_result(
    sqlite_database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The long history is one of few steps here: the bounds are lowered instead."""
    for name, value in (("_STEPS_READ_FIRST", 30), ("_STEPS_READ_AT_ONCE", 70), ("_STEPS_WITH_DENSE_STATES", 30)):
        monkeypatch.setattr(late_replays, name, value)
    monkeypatch.setattr(replay_detectors, "SPARSE_MILESTONE_STEPS", 50)
    steps = 250
    in_order = closed_run(sqlite_database, "in order", {}, steps)
    late = closed_run(sqlite_database, "late", {3: {LENGTH: 900.0, K3: 3e-2}, 120: {LENGTH: 60.0}}, steps)
    for step in (3, 120):
        late.close(step, values_at(step))
        assert due(sqlite_database) == []
    (alerts, expected), (alerts_late, found) = outcome(in_order), outcome(late)
    assert alerts_late == alerts
    assert found.pop() == expected.pop(), "the newest state"
    assert len(found) < len(expected)
    assert set(found) < set(expected)
    assert [each[0] for each in found if each[2]][-2:] == [225, 250]
    for run in (in_order, late):
        run.close(steps + 1, values_at(steps + 1))
    assert outcome(late)[1][-1] == outcome(in_order)[1][-1]
    assert late.decisions() == in_order.decisions()


def test_two_late_steps_are_both_replayed_when_the_first_is_soon_forgotten(sqlite_database: Database) -> None:
    steps = 450
    expected = outcome(closed_run(sqlite_database, "in order", {}, steps))
    late = closed_run(sqlite_database, "late", {20: {LENGTH: 140.0}, 380: {LENGTH: 900.0, K3: 3e-2}}, steps)
    handlers, late.events = late.events, EventBus()
    subscribe_without(late.events, ReplayDue)
    for step in (380, 20):
        late.close(step, values_at(step))
    assert make_due_replay(handlers, late.run, sqlite_database)
    assert outcome(late) == expected


def test_alert_that_clears_after_the_replay_stays_cleared(sqlite_database: Database) -> None:
    def values(step: int) -> dict[str, float]:
        return {LENGTH: 100.0, K3: 2e-2 if 60 < step < 430 else 1e-4}

    outcomes = []
    for key, first in (("in order", 100.0), ("late", 140.0)):
        run = RecordedRun(sqlite_database).begin(key)
        for step in range(1, 451):
            run.close(step, values(step) | ({LENGTH: first} if step == 50 else {}))
        run.close(50, values(50))
        outcomes.append(outcome(run))
    assert outcomes[0] == outcomes[1]
    assert ("mismatch_critical", 75, "resolved") in [(each[0], each[1], each[5]) for each in outcomes[0][0]]


def test_writer_does_no_more_for_late_data_of_a_longer_run(sqlite_template: Path, tmp_path: Path) -> None:
    shutil.copy(sqlite_template, tmp_path / "foreshock.db")
    database = Database(f"sqlite:///{tmp_path}/foreshock.db")
    try:
        counts = {}
        for steps in (STEPS, 2 * STEPS):
            run = closed_run(database, str(steps), {1: {LENGTH: 103.0}}, steps)
            with writes() as seen:
                run.close(1, values_at(1))
            counts[steps] = seen
        short, long = counts[STEPS], counts[2 * STEPS]
        assert len(short) == len(long)
        for (statement, rows), (of_long, rows_of_long) in zip(short, long, strict=True):
            assert of_long == statement
            # States are kept once in a block of steps.
            assert rows_of_long - rows <= STEPS // MILESTONE_STEPS + RECENT_STATES, statement
    finally:
        database.close()


@pytest.mark.parametrize("attempts", [50])
def test_closing_a_step_takes_no_more_statements_after_many_resumes(database: Database, attempts: int) -> None:
    once = closed_run(database, "once", {}, 60)
    often = RecordedRun(database).begin("often")
    for number in range(1, attempts):
        often.close(number, values_at(number))
        often.resume(number + 1)
    for step in range(attempts, 61):
        often.close(step, values_at(step))
    counts = []
    for run in (once, often):
        with statements() as seen:
            run.database.write(lambda session, run=run: publish(run, session))  # type: ignore[misc]
        counts.append(len(seen))
    assert counts[0] == counts[1], counts


def publish(run: RecordedRun, session: Session) -> None:
    """Publish that the newest step changed."""
    from foreshock_service.runs.events import StepClosed

    run.events.publish(session, StepClosed(run.run, run.attempt, 60))


class Racing:
    """A database in which something else is written before the first write."""

    def __init__(self, database: Database, first: Callable[[], object]) -> None:
        self.read = database.read
        self.writes = 0
        self._database, self._first = database, first

    def write(self, work: Callable[[Session], Any]) -> Any:
        """Run the work, after what comes first."""
        self.writes += 1
        if self.writes == 1:
            self._first()
        return self._database.write(work)


def subscribe_without(events: EventBus, missing: type) -> None:
    """Subscribe every handler but those of one event, as if the process died before them."""
    subscribe_handlers(events)
    events._handlers.pop(missing)


@contextmanager
def statements() -> Iterator[list[tuple[str, int]]]:
    """Collect the SQL statements that any engine executes, each with its number of rows of parameters."""
    seen: list[tuple[str, int]] = []

    def note(connection: Any, cursor: Any, statement: str, parameters: Any, context: Any, many: bool) -> None:
        seen.append((statement, len(parameters) if many else 1))

    event.listen(Engine, "before_cursor_execute", note)
    try:
        yield seen
    finally:
        event.remove(Engine, "before_cursor_execute", note)


@contextmanager
def writes() -> Iterator[list[tuple[str, int]]]:
    """Collect the statements of transactions that write, on SQLite."""
    found: list[tuple[str, int]] = []
    with statements() as seen:
        yield found
    writing = False
    for statement, rows in seen:
        if statement.startswith("BEGIN"):
            writing = statement == "BEGIN IMMEDIATE"
        if writing:
            found.append((statement, rows))
