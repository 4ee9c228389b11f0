"""The real service, started as a user starts it, for benchmarks and tests."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import httpx
import psutil

from benchmarks.forking import environment, fork_service
from tests.ports import free_port

# Importing the web framework is slow while an engine keeps both cores busy.
PATIENCE_SECONDS = 240


def running_service(folder: Path, **settings: str) -> AbstractContextManager[str]:
    """Start `foreshock serve` with its embedded defaults in `folder`, yield its address, and stop it at the end.

    `settings` are FORESHOCK_* variables by name. Raises RuntimeError with the end of its log if it dies or is not ready
    in time.
    """
    return _running(folder, settings, forked=False)


@contextmanager
def service(**settings: str) -> Iterator[tuple[Path, httpx.Client]]:
    """Start a service in a folder of its own; yield the folder, and a client that requests uncompressed bodies."""
    with (
        tempfile.TemporaryDirectory(prefix="foreshock-bench-") as folder,
        running_service(Path(folder), **settings) as url,
        httpx.Client(base_url=url, timeout=600, headers={"Accept-Encoding": "identity"}) as http,
    ):
        yield Path(folder), http


def forked_service(folder: Path, **settings: str) -> AbstractContextManager[str]:
    """Like `running_service`, but in a process forked as in `forking`: for tests."""
    return _running(folder, settings, forked=True)


def wait_until(reached: Callable[[], bool], seconds: float) -> bool:
    """Wait until `reached` returns True; return False if it does not in time."""
    deadline = time.monotonic() + seconds
    while not reached():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def wait_until_advanced(http: httpx.Client, run: str) -> None:
    """Wait until the service has worked out what follows from the newest data of a run."""
    while http.get(f"/v1/runs/{run}").raise_for_status().json().get("advancing"):
        time.sleep(0.005)


@contextmanager
def _running(folder: Path, settings: Mapping[str, str], *, forked: bool) -> Iterator[str]:
    port = settings.get("FORESHOCK_PORT") or str(free_port())
    log = folder / "serve.log"
    surroundings = environment(**{**settings, "FORESHOCK_PORT": port})
    server: subprocess.Popen[bytes] | psutil.Process
    if forked:
        server = fork_service(surroundings, folder, log)
    else:
        with log.open("w") as sink:
            command = [sys.executable, "-m", "foreshock.commands.main", "serve"]
            server = subprocess.Popen(command, cwd=folder, stdout=sink, stderr=subprocess.STDOUT, env=surroundings)
    address = f"http://127.0.0.1:{port}"
    try:
        _wait_until_ready(address, server, log)
        yield address
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            server.terminate()
        server.wait(timeout=120)


def _wait_until_ready(address: str, server: subprocess.Popen[bytes] | psutil.Process, log: Path) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline and _is_running(server):
        try:
            ready = httpx.get(f"{address}/readyz")
            if ready.status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    raise RuntimeError(f"the service did not become ready:\n{log.read_text()[-2000:]}")


def _is_running(server: subprocess.Popen[bytes] | psutil.Process) -> bool:
    return server.is_running() if isinstance(server, psutil.Process) else server.poll() is None
