"""Two service processes on one PostgreSQL: nothing is done twice, and one that dies is replaced."""

from __future__ import annotations

import json
import re
import signal
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import httpx
import psutil
import pytest

from foreshock_service.platform.database.opening import upgrade
from foreshock_service.platform.database.session import Database
from foreshock_service.platform.health import JOB_LAST_RUN
from tests.service.advancing import is_due, paused
from tests.service.operation.processes import ServiceProcess, service_process
from tests.service.postgres import PostgresCluster
from tests.service.receiving import serving
from tests.service.watch.recorded import K3, RecordedRun
from tests.waiting import wait_until

pytestmark = pytest.mark.slow


@pytest.fixture
def webhook() -> Iterator[tuple[str, Counter[str]]]:
    """A target of notifications: its address, and how often it got each message."""
    received: Counter[str] = Counter()

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            received[self.headers["Idempotency-Key"]] += 1
            # Long enough for another process to look for the same message.
            time.sleep(0.3)
            self.send_response(200)
            self.end_headers()

        def log_request(self, code: object = "-", size: object = "-") -> None:
            """Log nothing."""

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
    settings = {
        "FORESHOCK_BOOTSTRAP_KEY": secret,
        "FORESHOCK_LOG_FORMAT": "json",
        "FORESHOCK_LOG_REQUESTS": "true",
    }
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


def test_processes_end_with_a_killed_supervisor_and_a_restart_has_its_port(
    tmp_path: Path, migrated_postgres: str
) -> None:
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
