"""The exporters of a client, and the thread of each: it waits for logged steps to close and writes each once.

Steps that the trainer has logged are pending until they are written. While any is pending, the service is asked after
1 s, then after 2, 4, … at most 30 s; nothing is asked otherwise. A step that closes late is written when it has closed,
after newer ones. A step that is still open after an hour is given up.
"""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import threading
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from foreshock.client.connection import run_url
from foreshock.client.reader import Reader
from foreshock.client.reporting import DeliveryStatus, LogOnce
from foreshock.errors import ConfigurationError
from foreshock.exporters.exporter import ExportedRun, Exporter
from foreshock.exporters.step_values import StepSource
from foreshock.exporters.trackers import (
    MlflowExporter,
    TensorBoardExporter,
    TrackioExporter,
    WandbExporter,
)

if TYPE_CHECKING:
    from foreshock.client.client import Client

_FIRST_SECONDS = 1.0
_LONGEST_SECONDS = 30.0
_FIRST_SECONDS_CLOSING = 0.1
_GIVE_UP_SECONDS = 3600.0
_MOST_PENDING = 10_000
_STEPS_PER_READ = 200
_LEAST_CLOSE_SECONDS = 1.0
_MOST_ANSWER_BYTES = 1 << 24
_VARIABLE = "FORESHOCK_EXPORT"

Export = str | Exporter | Iterable[str | Exporter]

_EXPORTERS: dict[str, type[Exporter]] = {
    each.name: each for each in (WandbExporter, TensorBoardExporter, MlflowExporter, TrackioExporter)
}
NAMES = tuple(_EXPORTERS)


class Exports:
    """The exporters of one client: started by the first step, and closed with it."""

    def __init__(self, export: Export | None, client: Client) -> None:
        """Make the exporters of the argument, or of FORESHOCK_EXPORT if it is None.

        Raises ConfigurationError for the argument; an error in the environment is logged, since rollouts matter more.
        """
        self._client = client
        self._log = LogOnce("foreshock.exporters")
        self._exporters: list[Exporter] = []
        self._threads: list[_ExportThread] = []
        try:
            self._exporters = make_exporters(os.environ.get(_VARIABLE, "") if export is None else export)
        except ConfigurationError as error:
            if export is not None:
                raise
            self._log.warning("environment", f"{_VARIABLE} is ignored, nothing is exported: {error}")

    def note_step(self, step: int) -> None:
        """Export `step` once it has closed; returns at once."""
        if self._exporters and not self._threads:
            self._threads = [_ExportThread(each, self._client, self._log) for each in self._exporters]
            atexit.register(self._close_at_exit)
        for thread in self._threads:
            thread.note_step(step)

    def close(self, timeout_seconds: float, status: DeliveryStatus) -> None:
        """Write the steps that the service has, within the timeout; do not wait if items are undelivered."""
        threads, self._threads, self._exporters = self._threads, [], []
        atexit.unregister(self._close_at_exit)
        for thread in threads:
            thread.begin_close(0.0 if status.undelivered else timeout_seconds)
        for thread in threads:
            thread.join()

    def _close_at_exit(self) -> None:
        self.close(2.0, DeliveryStatus())


def make_exporters(export: Export) -> list[Exporter]:
    """Return the exporters of a name, of comma-separated names, of an Exporter, or of several of these.

    Raises ConfigurationError for an unknown name, for one that is named twice, and if a package is missing.
    """
    entries = [export] if isinstance(export, str | Exporter) else list(export)
    made: list[Exporter] = []
    for entry in entries:
        if isinstance(entry, Exporter):
            made.append(entry)
        else:
            made += [_named(name.strip()) for name in entry.split(",") if name.strip()]
    names = [each.name for each in made]
    for name in names:
        if names.count(name) > 1:
            raise ConfigurationError(f"export names {name!r} twice; each step would be written twice")
    return made


def _named(name: str) -> Exporter:
    if name not in _EXPORTERS:
        raise ConfigurationError(f"unknown exporter {name!r}; exporters: {', '.join(NAMES)}")
    return _EXPORTERS[name]()


class _ExportThread:
    """Exports one run to one tracker. `note_step` never waits and never raises; `join` waits up to the timeout."""

    def __init__(self, exporter: Exporter, client: Client, log: LogOnce) -> None:
        self._exporter = exporter
        self._client = client
        self._log = log
        self._written = 0
        self._pending: dict[int, float] = {}
        self._done: set[int] = set()
        self._lock = threading.Lock()
        self._noted = threading.Event()
        self._closing = threading.Event()
        self._deadline = math.inf
        self._reader: Reader | None = None
        self._source: StepSource | None = None
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._work, name=f"foreshock-export-{exporter.name}", daemon=True)
        self._thread.start()

    def note_step(self, step: int) -> None:
        """Export `step` once it has closed. Called in the trainer's thread."""
        if self._pid != os.getpid() or self._closing.is_set():
            return
        try:
            if not self._exporter.ready:
                self._exporter.attach()
        except Exception as error:
            self._warn("attach", f"finding the active run failed: {error!r}")
        with self._lock:
            if step not in self._done and len(self._pending) < _MOST_PENDING:
                self._pending.setdefault(step, time.monotonic())
        self._noted.set()

    def begin_close(self, timeout_seconds: float) -> None:
        """Let the thread end when all steps are written, or after the timeout."""
        self._deadline = time.monotonic() + timeout_seconds
        self._closing.set()
        self._noted.set()

    def join(self) -> None:
        """Wait until the thread has ended, at most until the deadline; log what was not written."""
        if self._pid != os.getpid():
            return
        self._thread.join(max(_LEAST_CLOSE_SECONDS, self._deadline - time.monotonic()))
        if self._thread.is_alive() and self._reader is not None:
            self._reader.connection.interrupt()
            self._thread.join(_LEAST_CLOSE_SECONDS)
        with self._lock:
            left = len(self._pending)
        if left:
            reason = f": {self._exporter.missing}" if not self._exporter.ready else "; the service has them"
            self._warn("left", f"{left} steps were not exported{reason}")

    def _work(self) -> None:
        delay = _FIRST_SECONDS
        try:
            while not self._closing.is_set():
                if self._noted.is_set() or not self._pending:
                    self._noted.wait()
                    self._noted.clear()
                    delay = _FIRST_SECONDS
                if self._closing.wait(delay):
                    break
                delay = _FIRST_SECONDS if self._export(closing=False) else min(2 * delay, _LONGEST_SECONDS)
            delay = _FIRST_SECONDS_CLOSING
            while self._pending and self._client.attempt is not None:
                self._export(closing=True)
                left = self._deadline - time.monotonic()
                if left <= 0.0:
                    break
                if self._pending:
                    time.sleep(min(delay, left))
                    delay = min(2 * delay, _FIRST_SECONDS)
        finally:
            self._finish()

    def _export(self, *, closing: bool) -> bool:
        """Write the pending steps that have closed; return True if there were any."""
        written = self._written
        try:
            self._export_closed_steps(closing=closing)
        except Exception as error:
            self._warn(f"export {type(error).__name__}", f"writing a step failed and is tried again: {error}")
        self._give_up_old()
        return self._written > written

    def _export_closed_steps(self, *, closing: bool) -> None:
        if self._client.attempt is None or not self._exporter.ready:
            return
        source = self._source or self._begin()
        with self._lock:
            pending = sorted(self._pending)
        while pending:
            first = pending[0]
            reached = [step for step in pending if step < first + _STEPS_PER_READ]
            pending = pending[len(reached) :]
            for step in source.read(first, reached[-1]):
                if step.step not in reached or (closing and time.monotonic() > self._deadline):
                    continue
                if not self._exporter.write(step, closing=closing):
                    return
                with self._lock:
                    self._done.add(step.step)
                    self._pending.pop(step.step, None)
                self._written += 1

    def _begin(self) -> StepSource:
        """Start the exporter with the registered run; return the source of its steps."""
        client, settings = self._client, self._client.settings
        run_id, attempt = client.run_id, client.attempt
        assert run_id is not None
        assert attempt is not None
        page = run_url(settings.url, client.project, client.run_key)
        self._exporter.start(ExportedRun(client.project, client.run_key, run_id, attempt, page))
        # It asks once, since steps are tried again, and has the limit of answers in a trainer.
        self._reader = Reader(
            settings.url,
            api_key=settings.api_key,
            timeout_seconds=settings.timeout_seconds,
            retry_seconds=0.0,
            max_answer_bytes=_MOST_ANSWER_BYTES,
        )
        self._source = StepSource(self._reader, run_id, attempt, self._exporter.measures)
        return self._source

    def _give_up_old(self) -> None:
        oldest = time.monotonic() - _GIVE_UP_SECONDS
        with self._lock:
            old = [step for step, noted in self._pending.items() if noted < oldest]
            for step in old:
                del self._pending[step]
        if old:
            self._warn("old", f"step {old[0]} is not exported: it was not written within an hour")

    def _finish(self) -> None:
        with contextlib.suppress(Exception):
            if self._reader is not None:
                self._reader.close()
        try:
            self._exporter.close()
        except Exception as error:
            self._warn("close", f"closing failed: {error!r}")

    def _warn(self, key: str, message: str) -> None:
        self._log.warning(f"{self._exporter.name} {key}", f"export to {self._exporter.name}: {message}")
