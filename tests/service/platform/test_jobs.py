"""Background jobs: of several processes one does a job, one that died is replaced, and a failure is no end."""

from __future__ import annotations

import threading
import time

import pytest

from foreshock_service.platform import jobs
from foreshock_service.platform.database.session import Database
from foreshock_service.platform.database.tables import BackgroundJob
from foreshock_service.platform.jobs import Job, JobRunner

SHORT_US = 200_000


def claim(
    database: Database, holder: str, names: list[str], interval_us: int = 0, lease_us: int = SHORT_US
) -> list[str]:
    return database.write(lambda session: jobs.claim(session, names, holder, interval_us, lease_us))


def finish(database: Database, holder: str, name: str) -> None:
    database.write(lambda session: jobs.finish(session, name, holder, None))


def test_one_process_gets_a_job_until_it_is_finished(database: Database) -> None:
    assert claim(database, "a", ["x", "y"]) == ["x", "y"]
    assert claim(database, "b", ["y", "z"]) == ["z"]
    finish(database, "b", "y")
    assert claim(database, "b", ["y"]) == []
    finish(database, "a", "y")
    assert claim(database, "b", ["x", "y"]) == ["y"]


def test_job_is_not_done_twice_in_an_interval(database: Database) -> None:
    assert claim(database, "a", ["x"], interval_us=10**9) == ["x"]
    finish(database, "a", "x")
    assert claim(database, "b", ["x"], interval_us=10**9) == []


def test_lease_of_a_process_that_died_ends_and_one_that_lives_is_extended(database: Database) -> None:
    assert claim(database, "dead", ["x"]) == ["x"]
    assert claim(database, "alive", ["y"]) == ["y"]
    database.write(lambda session: jobs.extend(session, ["x", "y"], "alive", 10**9))
    time.sleep(2 * SHORT_US / 1e6)
    assert claim(database, "other", ["x", "y"]) == ["x"]


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
def test_processes_that_run_together_do_each_round_once(database: Database) -> None:
    running, most, rounds = [0], [0], [0]
    lock = threading.Lock()

    def work() -> None:
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
        time.sleep(0.05)
        with lock:
            running[0] -= 1
            rounds[0] += 1

    runners = [JobRunner(database, [Job("x", work)], 0.3, holder=f"process {number}") for number in range(4)]
    begin = time.monotonic()
    for runner in runners:
        runner.start()
    while rounds[0] < 5:
        assert time.monotonic() - begin < 60
        time.sleep(0.01)
    for runner in runners:
        runner.stop()
    seconds = time.monotonic() - begin
    assert most[0] == 1
    assert rounds[0] <= seconds / (0.3 * 0.9) + 1
    with database.read() as session:
        (row,) = jobs.all_jobs(session)
        assert (row.runs, row.error) == (rounds[0], None)


def test_job_that_fails_is_recorded_and_the_others_run(database: Database) -> None:
    done = []

    def fail() -> None:
        raise ValueError("secret detail")

    runner = JobRunner(database, [Job("fails", fail), Job("own", lambda: done.append("own"), shared=False)], 60.0)
    runner.run_round()
    assert done == ["own"]
    assert (runner.records["fails"].error, runner.records["fails"].failures) == ("ValueError", 1)
    assert runner.records["own"].error is None
    with database.read() as session:
        rows = {row.name: row.error for row in session.query(BackgroundJob)}
    # SQLite has one process: nothing is written.
    assert rows == ({} if database.is_sqlite else {"fails": "ValueError"})
