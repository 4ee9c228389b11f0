"""Workers as processes of their own, started as a user starts them, killed and frozen."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil

from benchmarks.jobs.probed_runs import ROOT


class WorkerProcess:
    """A place for a worker that offers `scorers`: one process after the other, each with a name of its own."""

    def __init__(self, label: str, url: str, root: Path, folder: Path, scorers: Sequence[str]) -> None:
        self._label, self._scorers = label, scorers
        self._folder = folder
        self._environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("FORESHOCK_")},
            "FORESHOCK_URL": url,
            "FORESHOCK_WEIGHTS_ROOTS": f"{ROOT}={root}",
            "FORESHOCK_ACCELERATOR": "cpu",
            "FORESHOCK_LEASE_WAIT_SECONDS": "5",
        }
        self._number = 0
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def name(self) -> str:
        """Return the name of its present worker."""
        return f"{self._label}-{self._number}"

    @property
    def log(self) -> Path:
        """Return the log of its present worker."""
        return self._folder / f"{self.name}.log"

    @property
    def alive(self) -> bool:
        """Return whether its worker runs."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start the next worker."""
        self._number += 1
        command = [
            sys.executable,
            "-m",
            "foreshock_probes.commands",
            "--name",
            self.name,
            "--scorers",
            ",".join(self._scorers),
        ]
        with self.log.open("wb") as sink:
            self._process = subprocess.Popen(command, env=self._environment, stdout=sink, stderr=subprocess.STDOUT)

    def kill(self) -> None:
        """Kill the worker. Its engines end by themselves, because their pipe is closed."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def kill_engine(self) -> bool:
        """Kill the worker's engines; return whether there was one."""
        assert self._process is not None
        engines = psutil.Process(self._process.pid).children()
        for engine in engines:
            engine.kill()
        return bool(engines)

    def freeze(self) -> None:
        """Stop the worker without ending it: it sends no heartbeats, and knows nothing of it."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let the worker go on."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        """End the worker."""
        if self.alive:
            self.kill()
