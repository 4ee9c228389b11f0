"""Several processes share the database connections of the settings: PostgreSQL's default allows 100 in all."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psycopg
import pytest

from foreshock_service.platform.settings import Settings
from tests.service.operation.processes import service_process
from tests.service.postgres import PostgresCluster

PROCESSES, CONNECTIONS, REQUESTS = 4, 12, 600


@pytest.mark.parametrize(("processes", "connections", "each"), [(1, 60, 60), (4, 60, 15), (8, 100, 12), (4, 2, 1)])
def test_processes_share_the_connections(processes: int, connections: int, each: int) -> None:
    settings = Settings(
        database_url="postgresql://localhost/foreshock", processes=processes, database_connections=connections
    )
    assert settings.connections_per_process == each


@pytest.mark.slow
def test_busy_processes_stay_within_their_connections_and_answer_every_request(
    tmp_path: Path, postgres: PostgresCluster
) -> None:
    url = postgres.new_database()
    counts, done = [0], threading.Event()

    def watch() -> None:
        query = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid != pg_backend_pid()"
        with psycopg.connect(url.replace("+psycopg", ""), autocommit=True) as connection:
            while not done.wait(0.01):
                counts.append(connection.execute(query).fetchone()[0])  # type: ignore[index]

    with (
        service_process(
            tmp_path,
            FORESHOCK_DATABASE_URL=url,
            FORESHOCK_PROCESSES=str(PROCESSES),
            FORESHOCK_DATABASE_CONNECTIONS=str(CONNECTIONS),
        ) as service,
        httpx.Client(base_url=service.url, timeout=60, limits=httpx.Limits(max_connections=60)) as http,
        ThreadPoolExecutor(61) as threads,
    ):
        watching = threads.submit(watch)

        def ask(number: int) -> httpx.Response:
            return http.get("/v1/runs") if number % 3 else http.post("/v1/runs", json={"key": f"run {number}"})

        answers = list(threads.map(ask, range(REQUESTS)))
        done.set()
        watching.result(60)
    assert {answer.text for answer in answers if answer.is_error} == set()
    assert sum(answer.status_code == httpx.codes.CREATED for answer in answers) == REQUESTS // 3
    # Each process has two more, which hear of changes and hold the names of background work.
    assert max(counts) <= CONNECTIONS + 2 * PROCESSES
    # The bound was reached, not just never approached.
    assert max(counts) > CONNECTIONS // 2
