"""The service under test: started, killed with all its processes, and started again on the same data."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil

from benchmarks.faults.kill_points import VARIABLE
from benchmarks.forking import environment, fork_service
from foreshock_service.platform.database.session import Database
from tests.ports import free_port

PATIENCE_SECONDS = 600.0


class Served:
    """`foreshock serve` on a fixed port, with its files below `folder`."""

    def __init__(self, folder: Path, database_url: str = "", **settings: str) -> None:
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
            # One decoder and no compilation, because the service is started often.
            "FORESHOCK_DECODE_PROCESSES": "1",
            "FORESHOCK_TOKEN_PASS": "numpy",
            "FORESHOCK_SWEEP_INTERVAL_SECONDS": "0.5",
            "FORESHOCK_LEASE_SECONDS": "3",
            # Many tries, because a try that ends with the service must not fail the job.
            "FORESHOCK_PROBE_TRIES": "1000",
            **settings,
        }
        self._process: psutil.Process | None = None

    def start(self, kill_at: tuple[str, int] | None = None) -> None:
        """Start the service without waiting; with `kill_at` it kills itself at that call of that point."""
        armed = {VARIABLE: "" if kill_at is None else f"{kill_at[0]}:{kill_at[1]}"}
        with contextlib.suppress(psutil.NoSuchProcess):
            log = self.folder / "service.log"
            self._process = fork_service(environment(**self.settings, **armed), self.folder, log)

    def wait_until(self, path: str = "/livez", seconds: float = PATIENCE_SECONDS) -> bool:
        """Wait until the answer to a path is 200; return False if the service has ended."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(self.url + path, timeout=5).status_code == 200:
                    return True
            if not self.alive:
                return False
            time.sleep(0.02)
        raise RuntimeError(f"the service does not answer {path}: {self.end_of_log()}")

    @property
    def alive(self) -> bool:
        """Return whether the process runs."""
        if self._process is not None and not self._process.is_running():
            self.kill()
        return self._process is not None

    def wait_for_end(self, seconds: float) -> bool:
        """Wait until the service ends by itself, as at a kill point; return False if it still runs."""
        deadline = time.monotonic() + seconds
        while self.alive:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.005)
        return True

    def kill(self) -> None:
        """Kill the service and its decoders with SIGKILL."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            with contextlib.suppress(psutil.NoSuchProcess):
                self._process.wait(60)
            self._process = None

    def kill_decoder(self) -> bool:
        """Kill one decoder with SIGKILL; return False if there is none."""
        for process in self.decoders():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
                return True
        return False

    def kill_process(self, draw: random.Random) -> bool:
        """Kill one of several service processes, but not its decoders, with SIGKILL; return False if there is none."""
        with contextlib.suppress(psutil.NoSuchProcess, IndexError):
            draw.choice(self._spawned(self._process) if self._process else []).kill()
            return True
        return False

    def decoders(self) -> list[psutil.Process]:
        """Return the decoder processes."""
        with contextlib.suppress(psutil.NoSuchProcess):
            spawned = self._spawned(self._process) if self._process else []
            if self.settings.get("FORESHOCK_PROCESSES", "1") == "1":
                return spawned
            return [each for process in spawned for each in self._spawned(process)]
        return []

    @staticmethod
    def _spawned(process: psutil.Process) -> list[psutil.Process]:
        """Return the processes that Python spawned for this process: service processes or decoders."""
        found = []
        for each in process.children():
            with contextlib.suppress(psutil.NoSuchProcess):
                if "spawn_main" in " ".join(each.cmdline()):
                    found.append(each)
        return found

    @contextmanager
    def database(self) -> Iterator[Database]:
        """Open the service's database while the service may run."""
        database = Database(self.database_url)
        try:
            yield database
        finally:
            database.close()

    def end_of_log(self) -> str:
        """Return the newest lines of the service's log."""
        path = self.folder / "service.log"
        return path.read_text(errors="replace")[-2000:] if path.exists() else "(no log)"
