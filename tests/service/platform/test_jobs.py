"""Background jobs: of several processes one does a job at a time, and a failure is no end."""

from __future__ import annotations

import threading
import time

import pytest

from foreshock_service.platform.database.session import Database
from foreshock_service.platform.jobs import Job, JobRunner


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
def test_processes_that_run_together_do_a_job_one_at_a_time(database: Database) -> None:
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

    runners = [JobRunner("jobs", database, [Job("x", work)], 0.1) for _ in range(4)]
    begin = time.monotonic()
    for runner in runners:
        runner.start()
    while rounds[0] < 5:
        assert time.monotonic() - begin < 60
        time.sleep(0.01)
    for runner in runners:
        runner.stop()
    assert most[0] == 1
    assert sum(runner.records["x"].runs for runner in runners) == rounds[0]


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
def test_a_job_of_each_process_runs_while_another_process_does_the_shared_ones(database: Database) -> None:
    done: list[str] = []
    jobs = [Job("shared", lambda: done.append("shared")), Job("own", lambda: done.append("own"), shared=False)]
    runner = JobRunner("jobs", database, jobs, 60.0)
    with database.exclusive("jobs") as is_alone:
        assert is_alone
        runner.run_round()
    assert done == ["own"]
    runner.run_round()
    assert done == ["own", "shared", "own"]


def test_job_that_fails_is_recorded_and_the_others_run(database: Database) -> None:
    done = []

    def fail() -> None:
        raise ValueError("secret detail")

    runner = JobRunner(
        "jobs", database, [Job("fails", fail), Job("own", lambda: done.append("own"), shared=False)], 60.0
    )
    runner.run_round()
    assert done == ["own"]
    assert {name: record.failures for name, record in runner.records.items()} == {"fails": 1, "own": 0}


def test_job_is_done_once_in_its_interval(database: Database) -> None:
    done: list[str] = []
    jobs = [Job("often", lambda: done.append("often")), Job("rare", lambda: done.append("rare"), every_seconds=3600.0)]
    runner = JobRunner("jobs", database, jobs, 60.0)
    runner.run_round()
    runner.run_round()
    assert done == ["often", "rare", "often"]
