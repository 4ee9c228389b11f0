"""Run commands of `foreshock` in processes that are forked from one that has imported the application.

`foreshock serve` takes 3.6 s of CPU time to start, 3 s of them for imports. Not for benchmarks or tests of the start
itself.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil


class _Forker:
    """The process that forks; it ends with this process, and its services with it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def fork(
        self,
        words: Sequence[str],
        environment: Mapping[str, str],
        folder: Path,
        output: Path,
        errors: Path,
        status: Path | None = None,
    ) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        wanted = [*words], dict(environment), *(str(path or "") for path in (folder, output, errors, status))
        with self._lock:
            print(json.dumps(wanted), file=self._process.stdin, flush=True)
            return int(self._process.stdout.readline())


_forker = functools.cache(_Forker)
_IMPORTED = ("foreshock_service.app", "foreshock.commands.report", "foreshock.commands.backtest")


def environment(**settings: str) -> dict[str, str]:
    """Return this process's environment with these variables and without any other settings of Foreshock."""
    return {name: value for name, value in os.environ.items() if not name.startswith("FORESHOCK_")} | settings


def fork_service(environment: Mapping[str, str], folder: Path, log: Path) -> psutil.Process:
    """Start `foreshock serve` in `folder` with this environment, and return its process, the first of its own group.

    Its output is added to `log`. Does not wait. Raises psutil.NoSuchProcess if it has ended already.
    """
    return psutil.Process(_forker().fork(["serve"], environment, folder, log, log))


def run_forked(
    words: Sequence[str], environment: Mapping[str, str], folder: Path, seconds: float = 300
) -> subprocess.CompletedProcess[str]:
    """Run a command in `folder` with this environment to its end. Raises psutil.TimeoutExpired after `seconds`."""
    with tempfile.TemporaryDirectory() as name:
        output, errors, status = (Path(name, each) for each in ("output", "errors", "status"))
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(_forker().fork(words, environment, folder, output, errors, status))
            try:
                process.wait(seconds)
            except psutil.TimeoutExpired:
                process.kill()
                raise
        # A command that was killed has no status.
        returned = int(status.read_text()) if status.exists() else -signal.SIGKILL
        return subprocess.CompletedProcess([*words], returned, output.read_text(), errors.read_text())


def _fork_commands() -> None:
    """Fork a command for each line of the input, and print its process id."""
    for module in _IMPORTED:
        importlib.import_module(module)

    # Ignored, so that ended children do not remain as zombies.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        if pid := os.fork():
            os.setpgid(pid, pid)
            print(pid, flush=True)
            continue
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        _run(*json.loads(line))


def _run(words: list[str], environment: dict[str, str], folder: str, output: str, errors: str, status: str) -> None:
    from benchmarks.faults.kill_points import VARIABLE, arm
    from foreshock.commands.main import main

    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    for stream, path in ((1, output), (2, errors)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), stream)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    arm(os.environ.get(VARIABLE, ""))
    try:
        returned = main(words)
    except SystemExit as ended:
        returned = ended.code if isinstance(ended.code, int) else 1
    if status:
        Path(status).write_text(str(returned))
    sys.exit(returned)


if __name__ == "__main__":
    _fork_commands()
