"""Fixtures of the probes' tests: tiny checkpoints, and a real service in a process of its own."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests.probes.tiny import save_checkpoint

LEASE_SECONDS = 8.0


@dataclass(frozen=True, slots=True)
class RunningService:
    """A service that answers at `url`; a lease lasts `LEASE_SECONDS`."""

    url: str
    http: httpx.Client


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root of weights with two checkpoints of one model: `first` and `second`."""
    root = tmp_path_factory.mktemp("weights")
    save_checkpoint(root / "first", seed=1)
    save_checkpoint(root / "second", seed=2)
    return root


@pytest.fixture(scope="session")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    """`foreshock serve` on its embedded default, in a folder of its own."""
    folder = tmp_path_factory.mktemp("service")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("FORESHOCK_")}
    environment |= {"FORESHOCK_LEASE_SECONDS": str(LEASE_SECONDS), "FORESHOCK_SWEEP_INTERVAL_SECONDS": "0.5"}
    log = folder / "serve.log"
    with log.open("wb") as sink:
        server = subprocess.Popen(
            [sys.executable, "-m", "foreshock.commands.main", "serve", "--port", str(port)],
            cwd=folder,
            env=environment,
            stdout=sink,
            stderr=subprocess.STDOUT,
        )
    try:
        # No connection is kept: the server closes idle ones, and tests sleep for as long as that takes.
        limits = httpx.Limits(max_keepalive_connections=0)
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120, limits=limits) as http:
            _wait_until_ready(http, server, log)
            yield RunningService(f"http://127.0.0.1:{port}", http)
    finally:
        server.terminate()
        server.wait(timeout=30)


def _wait_until_ready(http: httpx.Client, server: subprocess.Popen[bytes], log: Path) -> None:
    ends = time.monotonic() + 90
    while time.monotonic() < ends and server.poll() is None:
        try:
            if http.get("/readyz").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    raise RuntimeError(f"the service did not become ready:\n{log.read_text(errors='replace')[-2000:]}")
