"""Several service processes on one PostgreSQL: nothing is done twice, connections are shared, the dead are replaced."""

import json
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import httpx
import psutil
import psycopg
import pytest

from foreshock_service.platform.database.opening import upgrade
from foreshock_service.platform.database.session import Database
from foreshock_service.platform.health import JOB_LAST_RUN
from foreshock_service.platform.settings import Settings
from tests.service.advancing import is_due, paused
from tests.service.operation.processes import ServiceProcess, service_process
from tests.service.postgres import PostgresCluster
from tests.service.receiving import QuietHandler, serving
from tests.service.watch.recorded import K3, RecordedRun
from tests.waiting import wait_until

pytestmark = pytest.mark.slow


@pytest.fixture
def webhook() -> Iterator[tuple[str, Counter[str]]]:
    """A target of notifications: its address, and how often it got each message, by its text."""
    received: Counter[str] = Counter()

    class Receiver(QuietHandler):
        def do_POST(self) -> None:  # noqa: N802
            received[self.rfile.read(int(self.headers["Content-Length"])).decode()] += 1
            # Long enough for another process to look for the same message.
            time.sleep(0.3)
            self.answer(200)

    with serving(Receiver) as address:
        yield f"{address}/hook", received


def last_run_of(service: ServiceProcess, job: str) -> float:
    """Return when the job last ended in this process; 0 if it has not run there."""
    metrics = httpx.get(f"{service.url}/metrics", timeout=60).raise_for_status().text
    found = re.search(rf'^{JOB_LAST_RUN}{{job="{job}"}} (\S+)$', metrics, re.M)
    return float(found[1]) if found else 0.0


def test_two_processes_share_the_work_and_one_that_is_killed_is_replaced(
    tmp_path: Path, postgres: PostgresCluster, webhook: tuple[str, Counter[str]]
) -> None:
    url = postgres.new_database()
    upgrade(url)
    address, received = webhook
    target = {"name": "hook", "url": address.replace("http", "json", 1), "severity": "info"}
    settings = {
        "FORESHOCK_DATABASE_URL": url,
        "FORESHOCK_STORE_URL": str(tmp_path / "tokens"),
        "FORESHOCK_SWEEP_INTERVAL_SECONDS": "0.5",
        "FORESHOCK_NOTIFICATIONS": json.dumps([target]),
    }
    database = Database(url)
    with service_process(tmp_path / "a", **settings) as first, service_process(tmp_path / "b", **settings) as second:
        run = RecordedRun(database).begin()
        with paused(database):
            run.close_all({K3: [2e-2] * 12}, range(1, 13))
        # One of the services advances it.
        wait_until(lambda: not is_due(run.advancing))
        # One message for the alerts of one cause, and another if it becomes worse after that was sent.
        alerts = run.alerts()
        assert len(alerts) > 1
        episodes = len({(alert.evidence["cause"], alert.evidence["episode"]) for alert in alerts})
        wait_until(lambda: len(received) >= episodes)
        # Time for a second one of each.
        time.sleep(3)
        assert set(received.values()) == {1}
        assert episodes <= len(received) <= len(alerts)

        # A change through one process ends a poll of the other.
        path = f"/v1/runs/{run.run}/lr-advice"
        etag = httpx.get(second.url + path, timeout=60).headers["ETag"]
        with ThreadPoolExecutor(1) as pool:
            address, headers = f"{second.url}{path}?wait=30", {"If-None-Match": etag}
            waiting = pool.submit(partial(httpx.get, address, headers=headers, timeout=60))
            time.sleep(1)
            begin = time.monotonic()
            body = {"kind": "hold", "reason": "a test"}
            decisions = f"{first.url}/v1/runs/{run.run}/advice/decisions"
            httpx.post(decisions, json=body, timeout=60).raise_for_status()
            assert waiting.result(timeout=60).json()["phase"] == "held"
        assert time.monotonic() - begin < 25

        # One of them dies; the other goes on with the jobs.
        first.process.send_signal(signal.SIGKILL)
        first.process.wait(timeout=60)
        killed_at = time.time()
        wait_until(lambda: last_run_of(second, "mark_waiting_runs") >= killed_at)
    database.close()


def test_log_of_a_service_has_no_raw_bytes_of_clients_and_no_secrets(tmp_path: Path) -> None:
    secret = "fsk_" + "s" * 43
    settings = {"FORESHOCK_BOOTSTRAP_KEY": secret, "FORESHOCK_LOG_FORMAT": "json", "FORESHOCK_LOG_REQUESTS": "true"}
    attack = "\x1b]0;x\x07\x1b[2J"
    with service_process(tmp_path, **settings) as service, httpx.Client(base_url=service.url, timeout=60) as http:
        http.headers["Authorization"] = f"Bearer {secret}"
        quoted = "%1b%5b2J%0aforged"
        http.get(f"/v1/runs/{quoted}", headers={"X-Request-Id": "first"})
        http.post("/v1/runs", json={"key": f"a{attack}"}, headers={"X-Request-Id": "second"})
        http.get("/livez", params={"key": secret}, headers={"Cookie": f"foreshock_session={secret}"})
        with service.connect() as connection:
            connection.sendall(
                f"GET /livez HTTP/1.1\r\nHost: 127.0.0.1\r\nUser-Agent: {attack[1:5]}\t\r\n"
                f"X-Request-Id: {secret}\r\nConnection: close\r\n\r\n".encode()
            )
            while connection.recv(65536):
                pass
        service.process.send_signal(signal.SIGTERM)
        assert service.process.wait(timeout=60) == 0
    text = service.log.read_bytes().decode()
    assert all(line.isprintable() for line in text.split("\n"))
    assert secret not in text
    lines = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    served = {line["request_id"]: line for line in lines if line["logger"] == "foreshock.requests"}
    assert served["first"]["path"].endswith("\\x1b[2J\\x0aforged")
    assert (served["second"]["method"], served["second"]["path"]) == ("POST", "/v1/runs")


def test_processes_end_with_a_killed_supervisor_and_free_its_port(tmp_path: Path, migrated_postgres: str) -> None:
    settings = {"FORESHOCK_PROCESSES": "2", "FORESHOCK_DATABASE_URL": migrated_postgres}
    with service_process(tmp_path, **settings) as service:
        # It is ready as soon as one of its processes is: two of the service, and a decoder of each.
        supervisor = psutil.Process(service.process.pid)
        started = wait_until(lambda: found if len(found := supervisor.children(recursive=True)) >= 4 else [])
        service.process.kill()
        service.process.wait(timeout=60)
        with service_process(tmp_path, service.port, **settings) as restarted:
            assert httpx.get(f"{restarted.url}/livez", timeout=60).status_code == 200
            assert psutil.wait_procs(started, timeout=60)[1] == []


PROCESSES, CONNECTIONS, REQUESTS = 4, 12, 600


@pytest.mark.parametrize(("processes", "connections", "each"), [(1, 60, 60), (4, 60, 15), (8, 100, 12), (4, 2, 1)])
def test_processes_share_the_connections(processes: int, connections: int, each: int) -> None:
    settings = Settings(
        database_url="postgresql://localhost/foreshock", processes=processes, database_connections=connections
    )
    assert settings.connections_per_process == each


@pytest.mark.slow
def test_busy_processes_stay_within_their_connections_and_answer(tmp_path: Path, postgres: PostgresCluster) -> None:
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
