"""The real service, `foreshock serve` in a process of its own."""

import contextlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from benchmarks.forking import fork_service
from tests.ports import free_port
from tests.waiting import wait_until_answered


class RunningService:
    """`foreshock serve` on a free port, its data below `folder`; it can be stopped and started again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._process: psutil.Process | None = None

    def start(self) -> None:
        """Start it and wait until it is ready."""
        data = self.folder / "data"
        data.mkdir(exist_ok=True)
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("FORESHOCK_")},
            "FORESHOCK_PORT": str(self.port),
            "FORESHOCK_DATABASE_URL": f"sqlite:///{data}/foreshock.db",
            "FORESHOCK_STORE_URL": f"{data}/tokens",
            # The same numbers as those of the compiled pass, which takes seconds of CPU time to load.
            "FORESHOCK_TOKEN_PASS": "numpy",
            "FORESHOCK_DECODE_PROCESSES": "1",
        }
        self._process = process = fork_service(environment, self.folder, self.folder / "service.log")
        wait_until_answered(f"{self.url}/readyz", process.is_running, self.folder / "service.log")

    def stop(self) -> None:
        """Terminate it, and kill it after 120 s."""
        if self._process is None:
            return
        with contextlib.suppress(psutil.NoSuchProcess):
            self._process.terminate()
        try:
            self._process.wait(120)
        except psutil.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None


@contextmanager
def running_service(folder: Path) -> Iterator[RunningService]:
    """Run the service during the block."""
    service = RunningService(folder)
    service.start()
    try:
        yield service
    finally:
        service.stop()
