"""Start `foreshock serve` processes from an interpreter that has imported the service: 0.3 s instead of 1.8 s of CPU.

Each start forks: the child is a process and a process group of its own that runs the command as a user does. Requests
and answers are lines of JSON on stdin and stdout: {"environment": {…}, "log": "…"} gives {"pid": …};
{"reap": pid} gives {"status": exit status, negative for a signal, null while it lives}.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class Launcher:
    """The launching process, as seen by the benchmark. Used by one thread."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.faults.launcher"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={name: value for name, value in os.environ.items() if not name.startswith("FORESHOCK_")},
        )

    def start(self, environment: Mapping[str, str], log: Path) -> int:
        """Start a service with these variables, of which one may name a kill point; return its pid."""
        return int(self._ask({"environment": dict(environment), "log": str(log)})["pid"])

    def status(self, pid: int) -> int | None:
        """Return the exit status, negative for a signal; None while it lives."""
        status: int | None = self._ask({"reap": pid})["status"]
        return status

    def wait(self, pid: int, seconds: float) -> int | None:
        """Wait for the end of a service; None if it still lives then."""
        deadline = time.monotonic() + seconds
        while (status := self.status(pid)) is None and time.monotonic() < deadline:
            time.sleep(0.01)
        return status

    def close(self) -> None:
        """End the launching process; services that run keep running."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(30)
        self._process.stdout.close()

    def _ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer


class PlainLauncher(Launcher):
    """Starts a new interpreter each time, for what must be there from its first instruction on."""

    def __init__(self) -> None:
        self._services: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, environment: Mapping[str, str], log: Path) -> int:
        """Start a service with these variables; return its pid."""
        others = {name: value for name, value in os.environ.items() if not name.startswith("FORESHOCK_")}
        command = [sys.executable, "-m", "foreshock.commands.main", "serve"]
        with log.open("ab") as sink:
            started = subprocess.Popen(
                command, env=others | dict(environment), stdout=sink, stderr=sink, start_new_session=True
            )
        self._services[started.pid] = started
        return started.pid

    def status(self, pid: int) -> int | None:
        """Return the exit status, negative for a signal; None while it lives."""
        return self._services[pid].poll()

    def close(self) -> None:
        """Do nothing: every service is waited for."""


def main() -> None:
    """Answer requests until stdin is closed."""
    import importlib

    # What `foreshock serve` imports.
    for name in (
        "foreshock.commands.main",
        "foreshock_service.serving",
        "foreshock_service.app",
        "alembic.command",
        "sqlite3",
        "psycopg",
    ):
        importlib.import_module(name)
    for name in ("uvicorn.protocols.http.auto", "uvicorn.loops.auto", "uvicorn.lifespan.on", "uvicorn.logging"):
        importlib.import_module(name)
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps(_reap(request["reap"]) if "reap" in request else {"pid": _fork(request)}), flush=True)


def _reap(pid: int) -> dict[str, int | None]:
    found, status = os.waitpid(pid, os.WNOHANG)
    return {"status": os.waitstatus_to_exitcode(status) if found else None}


def _fork(request: Mapping[str, Any]) -> int:
    pid = os.fork()
    if pid:
        return pid

    os.setsid()
    os.environ.update(request["environment"])
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for descriptor, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(descriptor, target)
    from benchmarks.faults.kill_points import VARIABLE, arm
    from foreshock.commands.main import main as run_command

    status = 1
    try:
        arm(os.environ.get(VARIABLE, ""))
        status = run_command(["serve"])
    finally:
        os._exit(status)


if __name__ == "__main__":
    main()
