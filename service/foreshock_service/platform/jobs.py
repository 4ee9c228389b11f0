"""Run periodic jobs in a thread of the service process, such as closing steps whose shards are overdue.

If several processes share a PostgreSQL database, one of them at a time runs the shared jobs. SQLite has one process.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

from foreshock.clock import now_us
from foreshock_service.platform.database.session import Database

_STOP_SECONDS = 5.0
_LONGEST_PAUSE_SECONDS = 0.1
"""A runner pauses twice as long as its round took, and at most so long: meanwhile further changes come together."""

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Job:
    """A periodic task. `shared`: it works on the database, so one process runs it for all; else each process runs it.

    It runs in each round, but at most once per `every_seconds`.
    """

    name: str
    run: Callable[[], object]
    shared: bool = True
    every_seconds: float = 0.0


@dataclass(slots=True)
class JobRecord:
    """Counts of a job's runs in this process, and the end of the newest."""

    runs: int = 0
    failures: int = 0
    finished_at_us: int | None = None


class JobRunner:
    """Thread that runs the jobs every `interval_seconds`. The error of a job is logged, and the job runs again.

    Runners with the same `name` in several processes do not run their shared jobs at the same time.
    """

    def __init__(self, name: str, database: Database, jobs: Sequence[Job], interval_seconds: float) -> None:
        self._name, self._database, self._jobs, self._interval = name, database, jobs, interval_seconds
        self.records = {job.name: JobRecord() for job in jobs}
        self._due = dict.fromkeys(self.records, 0.0)
        self._stopping, self._woken = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._loop, name=f"foreshock-{name}", daemon=True)

    def start(self) -> None:
        """Start the thread; the first round comes after one interval."""
        self._thread.start()

    def wake(self) -> None:
        """Begin a round soon, without waiting for the end of the interval; from any thread."""
        self._woken.set()

    def stop(self) -> None:
        """End the thread after the current job. A job that takes longer than 5 s is abandoned, as in a crash."""
        self._stopping.set()
        self._woken.set()
        if self._thread.is_alive():
            self._thread.join(_STOP_SECONDS)

    def run_round(self) -> None:
        """Run the due jobs; the shared ones only if no other process runs them at this moment."""
        due = [job for job in self._jobs if time.monotonic() >= self._due[job.name]]
        is_shared = any(job.shared for job in due)
        with self._database.exclusive(self._name) if is_shared else nullcontext(False) as is_alone:
            for job in due:
                if not self._stopping.is_set() and (is_alone or not job.shared):
                    self._due[job.name] = time.monotonic() + job.every_seconds
                    self._run(job)

    def _run(self, job: Job) -> None:
        record = self.records[job.name]
        try:
            job.run()
        except Exception:
            record.failures += 1
            self._due[job.name] = 0.0
            _logger.exception("the job %s failed; it runs again in %s s", job.name, self._interval)
        record.finished_at_us = now_us()
        record.runs += 1

    def _loop(self) -> None:
        while True:
            self._woken.wait(self._interval)
            self._woken.clear()
            if self._stopping.is_set():
                return
            begun = time.monotonic()
            try:
                self.run_round()
            except Exception:
                _logger.exception("the jobs of the service failed; they run again in %s s", self._interval)
            self._stopping.wait(min(2 * (time.monotonic() - begun), _LONGEST_PAUSE_SECONDS))
