"""The commands of docs/operations.md work as written: keys, PostgreSQL, four processes, a second host name.

Only the database's address is replaced. The name `foreshock`, by which the document lets others reach the service, is
resolved to an address of this machine that is not 127.0.0.1.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

import foreshock
from tests.paths import DOCS
from tests.ports import free_port
from tests.service.postgres import start_postgres
from tests.service.working import lease_request
from tests.waiting import wait_until_answered

pytestmark = pytest.mark.slow

DATABASE = "postgresql+psycopg://foreshock:…@database/foreshock"


HOST, ADDRESS = "foreshock", "127.0.0.2"


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of the service in the document, as this process resolves it."""
    resolve = socket.getaddrinfo
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda name, *rest, **more: resolve(ADDRESS if name == HOST else name, *rest, **more)
    )
    return HOST


def test_trainer_logs_by_the_second_host_name(tmp_path: Path, host: str) -> None:
    port = free_port()
    text = (DOCS / "operations.md").read_text()
    (commands,) = re.findall(r"### By hand\n\n```\n(.*?)```", text, re.DOTALL)
    assert DATABASE in commands
    assert f"FORESHOCK_ALLOWED_HOSTS={host} " in commands
    cluster = start_postgres()
    commands = commands.replace(DATABASE, cluster.new_database())
    environment = {name: value for name, value in os.environ.items() if not name.startswith("FORESHOCK_")}
    environment |= {"FORESHOCK_PORT": str(port), "FORESHOCK_TOKEN_PASS": "numpy", "FORESHOCK_DECODE_PROCESSES": "1",
                    "PATH": f"{Path(sys.executable).parent}:{environment['PATH']}"}  # fmt: skip
    with (tmp_path / "log").open("w+") as log:
        shell = subprocess.Popen(
            ["bash", "-euc", commands], cwd=tmp_path, env=environment, stdout=log, stderr=log, start_new_session=True
        )
        try:
            address = f"http://{host}:{port}"
            wait_until_answered(f"{address}/readyz", lambda: shell.poll() is None, tmp_path / "log")
            trainer, worker = re.findall(r"fsk_\S+", (tmp_path / "log").read_text())
            assert httpx.get(f"{address}/v1/runs", timeout=60).status_code == 401
            assert httpx.get(f"{address}/v1/runs", headers={"Host": "elsewhere"}, timeout=60).status_code == 400
            client = foreshock.Client(address, run_key="team", api_key=trainer, spool_directory=tmp_path / "spool")
            with client.start_run(model="M"):
                client.log_scalars(1, {"grad_norm": 0.5})
                assert client.flush(120)
            headers = {"Authorization": f"Bearer {trainer}"}
            run = httpx.get(f"{address}/v1/runs/team", headers=headers, timeout=60).raise_for_status().json()
            assert run["state"] == "finished"
            headers = {"Authorization": f"Bearer {worker}"}
            leased = httpx.post(f"{address}/v1/leases", json=lease_request(), headers=headers, timeout=60)
            assert leased.status_code == 204
        finally:
            os.killpg(shell.pid, signal.SIGTERM)
            shell.wait(120)
            cluster.stop()
