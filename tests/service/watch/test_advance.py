"""Whatever disturbs a worker, a run ends as if its data had come in order and nobody had disturbed it."""

import json
import math
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from sqlalchemy import Table, select, update
from sqlalchemy.orm import Session

from foreshock_service.platform.compression import zstd
from foreshock_service.platform.database import tables
from foreshock_service.platform.database.engine import table_of
from foreshock_service.platform.database.session import Database
from foreshock_service.platform.security import UNRESTRICTED
from foreshock_service.runs.events import StepKey
from foreshock_service.runs.runs import RunUpdate, update_run
from foreshock_service.runs.steps import mark_step
from foreshock_service.watch import advance
from foreshock_service.watch.detection import derivation
from foreshock_service.watch.detection.derivation import mark_outdated
from foreshock_service.watch.detection.states import NEWEST_STATES, STEPS_OF_A_BLOCK
from tests.service.advancing import advance_all, is_due, paused
from tests.service.statements import Executed, executed
from tests.service.watch.recorded import K3, LENGTH, SURGE, SURGE_STEPS, RecordedRun

STEPS = 90


def values_at(step: int) -> dict[str, float]:
    """Return a history with a surge of the lengths, and a critical mismatch for a while."""
    surge = 2.5 if step > STEPS // 2 else 1.0
    return {LENGTH: surge * (100.0 + math.sin(step)), K3: 2e-2 if 30 < step < 60 else 1e-4 * (1 + step % 3)}


def outcome(run: RecordedRun) -> tuple[list[Any], list[Any]]:
    """Return what the detectors made of a run: its alerts, and its snapshots with the newest state."""
    alerts = [
        (alert.rule, alert.step, alert.value, alert.evidence, alert.cleared_step, alert.state)
        for alert in run.alerts()
        if alert.state != "retracted"
    ]
    snapshots = [(each.step, each.attempt, each.milestone, each.state) for each in run.snapshots()]
    return alerts, [*snapshots, run.newest_state()]


def closed_run(
    database: Database, key: str, changed: Mapping[int, Mapping[str, float]], steps: int = STEPS
) -> RecordedRun:
    """Return a run that closed every step, in which some first had other values."""
    run = RecordedRun(database).begin(key)
    with paused(database):
        for step in range(1, steps + 1):
            run.close(step, changed.get(step) or values_at(step))
    advance_all(run.advancing)
    return run


_in_order: dict[tuple[str, int], tuple[list[Any], list[Any]]] = {}


def outcome_in_order(database: Database, steps: int = STEPS) -> tuple[list[Any], list[Any]]:
    """Return the outcome of a history that was never different, of one run for all tests on a kind of database."""
    key = (database._read_engine.dialect.name, steps)
    if key not in _in_order:
        _in_order[key] = outcome(closed_run(database, "in order", {}, steps))
    return _in_order[key]


LATE = {2: {LENGTH: 900.0, K3: 3e-2}, 3: {LENGTH: 900.0, K3: 3e-2}}


def late_run(database: Database, *also: int) -> RecordedRun:
    """Return a run in which steps had other values, with the right values of steps 2 and 3 to be taken in."""
    late = closed_run(database, "late", LATE | {step: {LENGTH: 900.0} for step in also})
    with paused(database):
        for step in (3, 2):
            late.close(step, values_at(step))
    return late


def test_late_data_gives_the_result_of_a_history_that_was_never_different(database: Database) -> None:
    expected = outcome_in_order(database)
    late = late_run(database)
    assert outcome(late) != expected
    assert late.advancing.advance_due_runs() == 1
    assert outcome(late) == expected
    assert not is_due(late.advancing)
    late.close(STEPS + 1, values_at(STEPS + 1))
    assert late.snapshots()[-1].step == STEPS + 1


def close_steps(run: RecordedRun, *steps: int) -> None:
    for step in steps:
        run.close(step, values_at(step))


@pytest.mark.parametrize("closing", [(80,), (4,), (STEPS + 1, STEPS + 2)], ids=["a later", "an earlier", "new ones"])
def test_change_during_a_derivation_is_taken_in(
    database: Database, monkeypatch: pytest.MonkeyPatch, closing: tuple[int, ...]
) -> None:
    expected = outcome_in_order(database, max(STEPS, *closing))
    late = late_run(database, *(step for step in closing if step <= STEPS))
    disturbed_by(monkeypatch, lambda: close_steps(late, *closing))
    with paused(database):
        advance_all(late.advancing)
    assert outcome(late) == expected


def test_resume_during_a_derivation_takes_back_the_rest(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    straight = closed_run(database, "in order", {})
    straight.resume(60)
    late = late_run(database)
    disturbed_by(monkeypatch, lambda: late.resume(60))
    with paused(database):
        advance_all(late.advancing)
    assert outcome(late)[1] == outcome(straight)[1]


def disturbed_by(monkeypatch: pytest.MonkeyPatch, disturb: Callable[[], None]) -> None:
    """Let something else be written between the first derivation and the transaction that stores it."""
    whole, once = derivation.go_on, [disturb]

    def go_on(*arguments: Any) -> None:
        whole(*arguments)
        if once:
            once.pop()()

    monkeypatch.setattr(derivation, "go_on", go_on)


PARTS = ["derivation.go_on", "alerts.reconcile_alerts", "diagnosis.diagnosis_to_store", "diagnoses.store_diagnosis"]


@pytest.mark.parametrize("part", PARTS)
def test_worker_that_dies_ends_in_the_same(database: Database, monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    expected = outcome_in_order(database)
    late = late_run(database)

    class Killed(BaseException):
        pass

    def die(*_: object, **__: object) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        module, name = part.split(".")
        patch.setattr(getattr(advance, module), name, die)
        with pytest.raises(Killed):
            late.advancing.advance_due_runs()
    # The worker of the next process.
    late.start()
    advance_all(late.advancing)
    assert outcome(late) == expected


def test_run_that_takes_long_waits_for_its_next_turn(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = outcome_in_order(database)
    late, other = late_run(database), RecordedRun(database).begin("other")
    monkeypatch.setattr(derivation, "_STEPS_READ_AT_ONCE", 30)
    monkeypatch.setattr(advance, "_TURN_SECONDS", 0.0)
    with paused(database):
        other.close(1, values_at(1))
        assert other.advancing.advance_due_runs() == 1
        assert [snapshot.step for snapshot in other.snapshots()] == [1]
        assert is_due(other.advancing)
        advance_all(other.advancing)
    assert outcome(late) == expected


def test_derivation_that_is_stopped_stays_due(database: Database) -> None:
    late = late_run(database)
    stopping = late.advancing._context.stopping
    stopping.set()
    assert late.advancing.advance_due_runs() == 0
    stopping.clear()
    assert late.advancing.advance_due_runs() == 1
    assert outcome(late) == outcome_in_order(database)


def test_alert_that_clears_long_after_late_data_stays_cleared(database: Database) -> None:
    def values(step: int) -> dict[str, float]:
        return {LENGTH: 100.0, K3: 2e-2 if 60 < step < 130 else 1e-4}

    outcomes = []
    for key, first in (("in order", 100.0), ("late", 140.0)):
        run = RecordedRun(database).begin(key)
        with paused(database):
            for step in range(1, 151):
                run.close(step, values(step) | ({LENGTH: first} if step == 50 else {}))
        advance_all(run.advancing)
        run.close(50, values(50))
        outcomes.append(outcome(run))
    assert outcomes[0] == outcomes[1]
    assert ("mismatch_critical", 75, "resolved") in [(each[0], each[1], each[5]) for each in outcomes[0][0]]


@pytest.mark.parametrize("form", ["fewer values", "other names", "damaged", "a list"])
def test_state_of_another_release_is_derived_again(http: httpx.Client, app: FastAPI, form: str) -> None:
    database: Database = app.state.context.database
    run = closed_run(database, "a-run", {}, 60)
    expected = outcome(run)
    advice = http.get(f"/v1/runs/{run.run}/lr-advice").json()

    def damage(session: Session) -> None:
        for row in session.scalars(select(tables.DetectorSnapshot)):
            state = json.loads(zstd.decompress(row.state))
            state["rules"]["rules"] = {name: values[:4] for name, values in state["rules"]["rules"].items()}
            forms = {"fewer values": state, "other names": {"step": row.step}, "a list": [1, 2]}
            row.state = b"\x00" if form == "damaged" else zstd.compress(json.dumps(forms[form]).encode())

    database.write(damage)
    meanwhile = http.get(f"/v1/runs/{run.run}/lr-advice").raise_for_status().json()
    assert (meanwhile["observed_step"], meanwhile["scale"]) == (60, advice["scale"])
    assert mark_outdated(database) == 1
    assert outcome(run) == expected
    assert http.get(f"/v1/runs/{run.run}/lr-advice").json() == advice
    assert mark_outdated(database) == 0


def test_step_that_closes_after_an_upgrade_derives_the_run_again(database: Database) -> None:
    run = closed_run(database, "a-run", {}, STEPS)
    database.write(
        lambda session: session.execute(update(tables.DetectorSnapshot).values(configuration_digest="older"))
    )
    run.close(STEPS + 1, values_at(STEPS + 1))
    assert outcome(run) == outcome_in_order(database, STEPS + 1)


@pytest.mark.parametrize("other", [{"configuration_digest": "older"}, {"state": b"of an older release"}])
@pytest.mark.parametrize(("state", "outdated"), [("running", 1), ("finished", 0)])
def test_upgrade_derives_runs_that_go_on(database: Database, state: str, outdated: int, other: dict[str, Any]) -> None:
    run = closed_run(database, "a-run", {}, 5)
    assert mark_outdated(database) == 0
    changes = RunUpdate(state=state)  # type: ignore[arg-type]
    database.write(lambda session: update_run(session, run.events, UNRESTRICTED, run.run, changes))
    database.write(lambda session: session.execute(update(tables.DetectorSnapshot).values(**other)))
    assert mark_outdated(database) == outdated


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
            assert rows_of_long - rows <= STEPS // STEPS_OF_A_BLOCK + NEWEST_STATES, statement
    finally:
        database.close()


def test_closing_a_step_takes_no_more_statements_after_many_resumes(database: Database) -> None:
    attempts = 50
    once = closed_run(database, "once", {}, 60)
    often = RecordedRun(database).begin("often")
    for number in range(1, attempts):
        often.close(number, values_at(number))
        often.resume(number + 1)
    for step in range(attempts, 61):
        often.close(step, values_at(step))
    counts = []
    for run in (once, often):
        with executed() as seen:
            run.database.write(lambda session, run=run: publish(run, session))  # type: ignore[misc]
        counts.append(len(seen))
    # Two more: the diagnosis reads the newest steps, of which some are of earlier attempts, and their fingerprints.
    assert counts[1] <= counts[0] + 2, counts


def publish(run: RecordedRun, session: Session) -> None:
    """Mark that the newest step changed."""
    mark_step(session, StepKey(run.run, run.attempt, 60))


@contextmanager
def writes() -> Iterator[list[Executed]]:
    """Collect the statements of transactions that write, on SQLite."""
    found: list[Executed] = []
    with executed() as seen:
        yield found
    writing = False
    for each in seen:
        if each.text.startswith("BEGIN"):
            writing = each.text == "BEGIN IMMEDIATE"
        if writing:
            found.append(each)


BAD_STATE: dict[str, tuple[Table, dict[str, Any]]] = {
    "detectors": (table_of(tables.DetectorSnapshot), {"state": b"of another release"}),
    "advice": (table_of(tables.FoldedAdvice), {"state": {}}),
    "decisions": (table_of(tables.AdviceDecision), {"decision": {"kind": "of another release"}}),
    "diagnosis": (table_of(tables.StoredDiagnosis), {"document": {"form": "of another release"}}),
}


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
@pytest.mark.parametrize("bad", [("detectors",), ("advice", "decisions"), ("diagnosis",)], ids=lambda each: each[0])
def test_run_with_unreadable_state_harms_no_other(http: httpx.Client, app: FastAPI, bad: tuple[str, ...]) -> None:
    database: Database = app.state.context.database
    runs = [RecordedRun(database).begin(key, advice_mode="apply") for key in ("first", "bad", "last")]
    for run in runs:
        run.close_all({LENGTH: SURGE}, SURGE_STEPS)

    def damage(session: Session) -> None:
        for table, values in (BAD_STATE[name] for name in bad):
            session.execute(update(table).where(table.c.run_id == runs[1].run).values(**values))

    database.write(damage)
    mark_outdated(database)
    for run in runs:
        run.close(119, {LENGTH: 260.0})
    assert http.get("/metrics").status_code == 200
    assert http.get("/").status_code == 200
    for run in runs:
        assert http.get(f"/v1/runs/{run.run}/diagnosis").json()["observed_step"] == 119
    for healthy in (runs[0], runs[2]):
        assert http.get(f"/v1/runs/{healthy.run}/lr-advice").raise_for_status().json()["observed_step"] == 119
    shown = [alert.rule for alert in runs[1].alerts() if alert.state == "open"]
    assert ("judging_failed" in shown) == ("decisions" in bad)
