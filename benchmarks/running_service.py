"""The real service, started as a user starts it, for benchmarks and tests."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from foreshock_service.platform.decoding.worker import FOR_NOW

# Importing the web framework is slow while an engine keeps both cores busy.
PATIENCE_SECONDS = 240


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def running_service(folder: Path, **settings: str) -> Iterator[str]:
    """Start `foreshock serve` on its embedded default in `folder`, yield its address, and stop it at the end.

    `settings` are FORESHOCK_* variables by name. Raises RuntimeError with the end of its log when it dies or is not
    ready in time.
    """
    port = free_port()
    log = folder / "serve.log"
    with log.open("w") as sink:
        server = subprocess.Popen(
            [sys.executable, "-m", "foreshock.commands.main", "serve", "--port", str(port)],
            cwd=folder,
            stdout=sink,
            stderr=subprocess.STDOUT,
            env={name: value for name, value in os.environ.items() if not name.startswith("FORESHOCK_")} | settings,
        )
    address = f"http://127.0.0.1:{port}"
    try:
        _wait_until_ready(address, server, log)
        yield address
    finally:
        server.terminate()
        server.wait(timeout=120)


def _wait_until_ready(address: str, server: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline and server.poll() is None:
        try:
            ready = httpx.get(f"{address}/readyz")
            # What is compiled meanwhile would take the processors, and what is measured then be numpy's.
            if ready.status_code == 200 and ready.json()["details"]["token_pass"] != FOR_NOW:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    raise RuntimeError(f"the service did not become ready:\n{log.read_text()[-2000:]}")
