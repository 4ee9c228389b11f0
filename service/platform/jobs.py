"""The thread of a process that does the periodic jobs, such as closing steps whose shards are overdue.

Of several processes on PostgreSQL one does the shared jobs at a time; SQLite has one process.
"""

import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache

from foreshock.clock import now_us
from foreshock_service.platform.database.session import Database

_STOP_SECONDS = 5.0
_logger = logging.getLogger(__name__)


@cache
def process_name() -> str:
    """Return the name of this process: host, process id and a random part."""
    return f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"


@dataclass(frozen=True, slots=True)
class Job:
    """A periodic task. `shared`: it works on the database, so one process is enough; else each process does its own.

    It is done in each round, at most once in `every_seconds`.
    """

    name: str
    run: Callable[[], object]
    shared: bool = True
    every_seconds: float = 0.0


@dataclass(slots=True)
class JobRecord:
    """How the runs of a job in this process went."""

    runs: int = 0
    failures: int = 0
    started_at_us: int | None = None
    finished_at_us: int | None = None
    error: str | None = None


class JobRunner:
    """Thread that does the jobs each `interval_seconds`; a job that raises is logged and runs again.

    `name` is what runners of several processes share that must not run at the same time.
    """

    def __init__(self, name: str, database: Database, jobs: Sequence[Job], interval_seconds: float) -> None:
        self._name, self._database, self._jobs, self._interval = name, database, jobs, interval_seconds
        self.records = {job.name: JobRecord() for job in jobs}
        self._due = dict.fromkeys(self.records, 0.0)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._loop, name=f"foreshock-{name}", daemon=True)

    def start(self) -> None:
        """Start the thread; the first round comes after one interval."""
        self._thread.start()

    def stop(self) -> None:
        """Finish the current job, then end the thread; a job that takes long is left behind, as by a crash."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(_STOP_SECONDS)

    def run_round(self) -> None:
        """Do the jobs, the shared ones unless another process does them at this moment."""
        due = [job for job in self._jobs if time.monotonic() >= self._due[job.name]]
        is_shared = any(job.shared for job in due)
        with self._database.exclusive(self._name) if is_shared else nullcontext(False) as is_alone:
            for job in due:
                if not self._stopping.is_set() and (is_alone or not job.shared):
                    self._due[job.name] = time.monotonic() + job.every_seconds
                    self._run(job)

    def _run(self, job: Job) -> None:
        record = self.records[job.name]
        record.started_at_us, record.finished_at_us, record.error = now_us(), None, None
        try:
            job.run()
        except Exception as error:
            record.error = type(error).__name__
            record.failures += 1
            self._due[job.name] = 0.0
            _logger.exception("the job %s failed; it runs again in %s s", job.name, self._interval)
        record.finished_at_us = now_us()
        record.runs += 1

    def _loop(self) -> None:
        while not self._stopping.wait(self._interval):
            try:
                self.run_round()
            except Exception:
                _logger.exception("the jobs of the service failed; they run again in %s s", self._interval)
