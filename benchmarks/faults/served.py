"""The service under test: started, killed with all its processes, and started again on the same data."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Mapping
from pathlib import Path

import httpx
import psutil

from benchmarks.faults.kill_points import VARIABLE
from benchmarks.faults.launcher import Launcher
from tests.ports import free_port

PATIENCE_SECONDS = 120.0


class Served:
    """`foreshock serve` on a port that it keeps, with its files below `folder`."""

    def __init__(self, launcher: Launcher, folder: Path, database_url: str = "", **settings: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.database_url = database_url or f"sqlite:///{folder}/foreshock.db"
        self.store = folder / "tokens"
        self.settings = {
            "FORESHOCK_PORT": str(self.port),
            "FORESHOCK_DATABASE_URL": self.database_url,
            "FORESHOCK_STORE_URL": str(self.store),
            # One decoder and nothing to compile: a start is mostly imports.
            "FORESHOCK_DECODE_PROCESSES": "1",
            "FORESHOCK_TOKEN_PASS": "numpy",
            "FORESHOCK_SWEEP_INTERVAL_SECONDS": "0.5",
            "FORESHOCK_LEASE_SECONDS": "3",
            # A job whose try ends with the service is no failed job.
            "FORESHOCK_PROBE_TRIES": "1000",
            **settings,
        }
        self.start_seconds: list[float] = []
        self._launcher = launcher
        self._pid = 0
        self._begun = 0.0

    def start(self, kill_at: tuple[str, int] | None = None, **settings: str) -> None:
        """Start it; with `kill_at` it ends itself at that call of that point. Does not wait."""
        environment = {**self.settings, **settings, VARIABLE: "" if kill_at is None else f"{kill_at[0]}:{kill_at[1]}"}
        self._begun = time.monotonic()
        self._pid = self._launcher.start(environment, self.folder / "service.log")

    def wait_until(self, path: str = "/livez", seconds: float = PATIENCE_SECONDS) -> bool:
        """Wait until a path is answered with 200; False if the service has ended."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(self.url + path, timeout=5).status_code == 200:
                    if path == "/livez":
                        self.start_seconds.append(time.monotonic() - self._begun)
                    return True
            if not self.alive:
                return False
            time.sleep(0.02)
        raise RuntimeError(f"the service does not answer {path}: {self.end_of_log()}")

    @property
    def alive(self) -> bool:
        """Return whether the process runs."""
        if self._pid and self._launcher.status(self._pid) is not None:
            self._kill_group()
            self._pid = 0
        return self._pid != 0

    def wait_for_end(self, seconds: float) -> bool:
        """Wait until it ends by itself, as it does at a kill point; False if it still runs."""
        deadline = time.monotonic() + seconds
        while self.alive:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.005)
        return True

    def kill(self) -> None:
        """End the service and its decoders with SIGKILL."""
        if self._pid:
            self._kill_group()
            if self._launcher.wait(self._pid, 60.0) is None:
                raise RuntimeError("a killed service does not end")
            self._pid = 0

    def kill_decoder(self) -> bool:
        """End one decoder with SIGKILL; False if there is none."""
        for process in self.decoders():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
                return True
        return False

    def kill_process(self, draw: random.Random) -> bool:
        """End one of several service processes with SIGKILL, not its decoders; False if there is none."""
        processes = self._spawned(psutil.Process(self._pid)) if self._pid else []
        with contextlib.suppress(psutil.NoSuchProcess, IndexError):
            draw.choice(processes).kill()
            return True
        return False

    def decoders(self) -> list[psutil.Process]:
        """Return the decoder processes."""
        with contextlib.suppress(psutil.NoSuchProcess):
            spawned = self._spawned(psutil.Process(self._pid))
            if self.settings.get("FORESHOCK_PROCESSES", "1") == "1":
                return spawned
            return [each for process in spawned for each in self._spawned(process)]
        return []

    @staticmethod
    def _spawned(process: psutil.Process) -> list[psutil.Process]:
        """Return the processes that Python spawned for this one: those of the service, or decoders."""
        found = []
        for each in process.children():
            with contextlib.suppress(psutil.NoSuchProcess):
                if "spawn_main" in " ".join(each.cmdline()):
                    found.append(each)
        return found

    def stop(self) -> None:
        """Stop it as an operator does, and kill it after a minute."""
        if self._pid:
            os.kill(self._pid, signal.SIGTERM)
            if self._launcher.wait(self._pid, 60.0) is None:
                self.kill()
            self._pid = 0

    def end_of_log(self) -> str:
        """Return the newest lines of its log."""
        path = self.folder / "service.log"
        return path.read_text(errors="replace")[-2000:] if path.exists() else "(no log)"

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._pid, signal.SIGKILL)


def with_settings(served: Served, settings: Mapping[str, str]) -> None:
    """Set variables of the next start."""
    served.settings.update(settings)
