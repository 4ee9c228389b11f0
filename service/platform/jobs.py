"""The thread of a process that does the periodic jobs, such as closing steps whose shards are overdue.

On PostgreSQL a job is leased by a row in the database, compared with the database's time: of several processes one does
it, at most once in an interval. A lease is extended while the job runs; one whose process died ends by itself, and
another process goes on. SQLite has one process.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import cache

from sqlalchemy import select, update
from sqlalchemy.orm import Session

from foreshock.clock import now_us
from foreshock_service.platform.database.engine import database_now_us, insert_if_absent
from foreshock_service.platform.database.session import Database
from foreshock_service.platform.database.tables import BackgroundJob


def claim(session: Session, names: Sequence[str], holder: str, interval_us: int, lease_us: int) -> list[str]:
    """Lease the jobs among `names` that no other process does and that are due; return their names, in that order."""
    now_us = database_now_us(session)
    rows = (
        select(BackgroundJob)
        .where(BackgroundJob.name.in_(names))
        .order_by(BackgroundJob.name)
        .with_for_update()
        .execution_options(populate_existing=True)
    )
    known = {row.name: row for row in session.scalars(rows)}
    for name in names:
        if name not in known:
            new = {"name": name, "holder": "", "leased_until_us": 0, "started_at_us": 0, "finished_at_us": None}
            insert_if_absent(session, BackgroundJob, new | {"runs": 0, "error": None})
    if len(known) < len(names):
        known = {row.name: row for row in session.scalars(rows)}
    claimed = []
    for name in names:
        row = known[name]
        if row.leased_until_us <= now_us and row.started_at_us <= now_us - interval_us:
            row.holder, row.leased_until_us, row.started_at_us = holder, now_us + lease_us, now_us
            row.finished_at_us = None
            claimed.append(name)
    return claimed


def extend(session: Session, names: Collection[str], holder: str, lease_us: int) -> None:
    """Extend the leases that this process has."""
    now_us = database_now_us(session)
    held = update(BackgroundJob).where(
        BackgroundJob.name.in_(names), BackgroundJob.holder == holder, BackgroundJob.leased_until_us > 0
    )
    session.execute(held.values(leased_until_us=now_us + lease_us))


def finish(session: Session, name: str, holder: str, error: str | None) -> None:
    """Record the end of a run and free the job, if this process still holds it."""
    row = session.scalar(
        select(BackgroundJob).where(BackgroundJob.name == name, BackgroundJob.holder == holder).with_for_update()
    )
    if row is not None:
        row.leased_until_us, row.finished_at_us = 0, database_now_us(session)
        row.runs += 1
        row.error = error


def all_jobs(session: Session) -> Sequence[BackgroundJob]:
    """Return every job that any process has done."""
    return session.scalars(select(BackgroundJob).order_by(BackgroundJob.name)).all()


def free(session: Session, names: Collection[str], holder: str) -> None:
    """Give up leases of this process."""
    held = update(BackgroundJob).where(BackgroundJob.name.in_(names), BackgroundJob.holder == holder)
    session.execute(held.values(leased_until_us=0))


LEASE_SECONDS = 15.0
_STOP_SECONDS = 5.0
# A part of the interval: the thread of a process does not wake on time to the millisecond.
_DUE = 0.9
_logger = logging.getLogger(__name__)


@cache
def process_name() -> str:
    """Return the name of this process, by which it holds leases: host, process id and a random part."""
    return f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"


@dataclass(frozen=True, slots=True)
class Job:
    """A periodic task. `shared`: it works on the database, so one process is enough; else each process does its own."""

    name: str
    run: Callable[[], object]
    shared: bool = True


@dataclass(slots=True)
class JobRecord:
    """How the runs of a job in this process went."""

    runs: int = 0
    failures: int = 0
    started_at_us: int | None = None
    finished_at_us: int | None = None
    error: str | None = None


@dataclass
class JobRunner:
    """Thread that does every job each `interval_seconds`; a job that raises is logged and runs again."""

    database: Database
    jobs: Sequence[Job]
    interval_seconds: float
    holder: str = field(default_factory=process_name)
    records: dict[str, JobRecord] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.records = {job.name: JobRecord() for job in self.jobs}
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="foreshock-jobs", daemon=True)

    def start(self) -> None:
        """Start the thread; the first round comes after one interval."""
        self._thread.start()

    def stop(self) -> None:
        """Finish the current job, then end the thread; a job that takes long is left behind, as by a crash."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(_STOP_SECONDS)

    def run_round(self) -> None:
        """Do the jobs that are due."""
        shared = [job.name for job in self.jobs if job.shared]
        claimed = set(shared)
        if shared and not self.database.is_sqlite:
            claimed = set(self._claim(shared))
        with _LeaseKeeper(self, claimed if not self.database.is_sqlite else set()):
            for job in self.jobs:
                if self._stopping.is_set():
                    break
                if not job.shared or job.name in claimed:
                    self._run(job)
        # What the stop kept from running is free at once.
        self._free({name for name in claimed if self._stopping.is_set()})

    def _run(self, job: Job) -> None:
        record = self.records[job.name]
        record.started_at_us, record.finished_at_us, record.error = now_us(), None, None
        try:
            job.run()
        except Exception as error:
            record.error = type(error).__name__
            record.failures += 1
            _logger.exception("the job %s failed; it runs again in %s s", job.name, self.interval_seconds)
        record.finished_at_us = now_us()
        record.runs += 1
        if job.shared and not self.database.is_sqlite:
            self.database.write(lambda session: finish(session, job.name, self.holder, record.error))

    def _claim(self, names: list[str]) -> list[str]:
        interval_us, lease_us = int(self.interval_seconds * _DUE * 1e6), int(LEASE_SECONDS * 1e6)
        return self.database.write(lambda session: claim(session, names, self.holder, interval_us, lease_us))

    def _free(self, names: set[str]) -> None:
        if names and not self.database.is_sqlite:
            self.database.write(lambda session: free(session, names, self.holder))

    def _loop(self) -> None:
        while not self._stopping.wait(self.interval_seconds):
            try:
                self.run_round()
            except Exception:
                _logger.exception("the jobs of the service failed; they run again in %s s", self.interval_seconds)


class _LeaseKeeper:
    """Thread that extends the leases of a round while it lasts."""

    def __init__(self, runner: JobRunner, names: set[str]) -> None:
        self._runner = runner
        self._names = names
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="foreshock-job-leases", daemon=True)

    def __enter__(self) -> None:
        if self._names:
            self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._names:
            self._thread.join(_STOP_SECONDS)

    def _loop(self) -> None:
        while not self._ended.wait(LEASE_SECONDS / 3):
            try:
                self._runner.database.write(
                    lambda session: extend(session, self._names, self._runner.holder, int(LEASE_SECONDS * 1e6))
                )
            except Exception:
                _logger.warning("the leases of jobs could not be extended", exc_info=True)
