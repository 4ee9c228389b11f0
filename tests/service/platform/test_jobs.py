"""Background jobs: of several processes one does a job at a time, and a failure is no end."""

import threading
import time

import pytest
from sqlalchemy import text
from sqlalchemy.exc import OperationalError

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


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
def test_work_under_a_name_has_the_only_connection_of_its_process(database_url: str) -> None:
    """Names that each took a connection left none for the work: it waited until the pool gave up."""
    database = Database(database_url, connections=1)
    other = Database(database_url, connections=1)
    with database.exclusive("advance a"), database.exclusive("advance b"), database.exclusive("advance a") as again:
        assert not again, "another thread of this process has it"
        assert database.write(lambda session: session.execute(text("SELECT 1")).scalar_one()) == 1
        with other.exclusive("advance a") as is_alone:
            assert not is_alone
    with other.exclusive("advance a") as is_alone:
        assert is_alone
    database.close()
    other.close()


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
def test_names_are_given_again_after_the_connection_is_lost(database_url: str) -> None:
    database = Database(database_url, connections=2)
    end = text("SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory'")
    with pytest.raises(OperationalError), database.exclusive("advance a"):
        database.write(lambda session: session.execute(end).all())
    with database.exclusive("advance a") as is_alone:
        assert is_alone
    database.close()


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
