"""`foreshock serve` in processes that are forked from one that has imported the application.

Imports take 3 of the 3.6 s of CPU time of a start. Not for what measures or tests the start itself.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

import psutil


class _Forker:
    """The process that forks; it ends with this process, and its services with it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def fork(self, environment: Mapping[str, str], folder: Path, log: Path) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        wanted = {"environment": dict(environment), "folder": str(folder), "log": str(log)}
        with self._lock:
            print(json.dumps(wanted), file=self._process.stdin, flush=True)
            return int(self._process.stdout.readline())


_forker = functools.cache(_Forker)


def fork_service(environment: Mapping[str, str], folder: Path, log: Path) -> psutil.Process:
    """Start `foreshock serve` in `folder` with this environment, and return its process, the first of its own group.

    Its output is added to `log`. Does not wait. Raises psutil.NoSuchProcess if it has ended already.
    """
    return psutil.Process(_forker().fork(environment, folder, log))


def _fork_services() -> None:
    """Fork a service for each line of the input, and print its process id."""
    importlib.import_module("foreshock_service.app")
    from benchmarks.faults.kill_points import VARIABLE, arm
    from foreshock.commands.main import main

    # The system forgets a process when it ends.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        if pid := os.fork():
            os.setpgid(pid, pid)
            print(pid, flush=True)
            continue
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        wanted = json.loads(line)
        os.environ.clear()
        os.environ.update(wanted["environment"])
        os.chdir(wanted["folder"])
        log = os.open(wanted["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        for stream in (1, 2):
            os.dup2(log, stream)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        arm(os.environ.get(VARIABLE, ""))
        sys.exit(main(["serve"]))


if __name__ == "__main__":
    _fork_services()
