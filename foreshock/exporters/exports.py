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
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from foreshock.api.watch import STANDING, AlertRecord
from foreshock.client.columns import Measurements
from foreshock.client.connection import run_url
from foreshock.client.reader import Reader
from foreshock.client.reporting import DeliveryStatus, LogOnce
from foreshock.comparisons import STEP_ROW, TRAINER_ROLLOUT
from foreshock.errors import ConfigurationError
from foreshock.exporters.trackers import Exporter, MlflowExporter, TensorBoardExporter, TrackioExporter, WandbExporter
from foreshock.learning_rate.advice import Advice
from foreshock.severity import SEVERITIES

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


class Exports:
    """The exporters of one client: started by the first step, and closed with it."""

    def __init__(self, export: Export | None, client: Client) -> None:
        """Make the exporters of the argument, or of FORESHOCK_EXPORT if it is None.

        Raises ConfigurationError for the argument; an error in the environment is logged, since rollouts matter more.
        """
        log, exporters = LogOnce("foreshock.exporters"), list[Exporter]()
        try:
            exporters = make_exporters(os.environ.get(_VARIABLE, "") if export is None else export)
        except ConfigurationError as error:
            if export is not None:
                raise
            log.warning("environment", f"{_VARIABLE} is ignored, nothing is exported: {error}")
        self._threads = [_ExportThread(each, client, log) for each in exporters]
        self._pid = os.getpid()

    def note_step(self, step: int) -> None:
        """Export `step` once it has closed; returns at once."""
        if self._pid != os.getpid():
            return
        for thread in self._threads:
            if thread.ident is None:
                thread.start()
                atexit.register(self._close_at_exit)
            thread.note_step(step)

    def close(self, timeout_seconds: float, status: DeliveryStatus) -> None:
        """Write the steps that the service has, within the timeout; do not wait if items are undelivered."""
        started = [thread for thread in self._threads if thread.ident is not None and self._pid == os.getpid()]
        self._threads = []
        atexit.unregister(self._close_at_exit)
        for thread in started:
            thread.begin_close(0.0 if status.undelivered else timeout_seconds)
        for thread in started:
            thread.end()

    def _close_at_exit(self) -> None:
        self.close(2.0, DeliveryStatus())


def make_exporters(export: Export) -> list[Exporter]:
    """Return the exporters of a name, of comma-separated names, of an Exporter, or of several of these.

    Raises ConfigurationError for an unknown name, for one that is named twice, and if a package is missing.
    """
    made: list[Exporter] = []
    for entry in [export] if isinstance(export, str | Exporter) else export:
        if isinstance(entry, Exporter):
            made.append(entry)
            continue
        for name in filter(None, map(str.strip, entry.split(","))):
            if name not in _EXPORTERS:
                raise ConfigurationError(f"unknown exporter {name!r}; exporters: {', '.join(_EXPORTERS)}")
            made.append(_EXPORTERS[name]())
    names = [each.name for each in made]
    for name in names:
        if names.count(name) > 1:
            raise ConfigurationError(f"export names {name!r} twice; each step would be written twice")
    return made


class _ExportThread(threading.Thread):
    """Exports one run to one tracker. `note_step` never waits and never raises; `end` waits up to the timeout."""

    def __init__(self, exporter: Exporter, client: Client, log: LogOnce) -> None:
        super().__init__(name=f"foreshock-export-{exporter.name}", daemon=True)
        self._exporter = exporter
        self._client = client
        self._log = log
        self._pending: dict[int, float] = {}
        self._done: set[int] = set()
        # The rules that have fired so far: each has a series.
        self._rules: set[str] = set()
        self._lock = threading.Lock()
        self._noted = threading.Event()
        self._closing = threading.Event()
        self._deadline = math.inf
        self._reader: Reader | None = None

    def note_step(self, step: int) -> None:
        """Export `step` once it has closed. Called in the trainer's thread."""
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

    def end(self) -> None:
        """Wait until the thread has ended, at most until the deadline; log what was not written."""
        self.join(max(_LEAST_CLOSE_SECONDS, self._deadline - time.monotonic()))
        if self.is_alive() and self._reader is not None:
            self._reader.connection.interrupt()
            self.join(_LEAST_CLOSE_SECONDS)
        if left := len(self._pending):
            reason = f": {self._exporter.missing}" if not self._exporter.ready else "; the service has them"
            self._warn("left", f"{left} steps were not exported{reason}")

    def run(self) -> None:
        """Write the pending steps until the client closes, then those that close before the deadline."""
        delay = _FIRST_SECONDS
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
        with contextlib.suppress(Exception):
            if self._reader is not None:
                self._reader.close()
        try:
            self._exporter.close()
        except Exception as error:
            self._warn("close", f"closing failed: {error!r}")

    def _export(self, *, closing: bool) -> bool:
        """Write the pending steps that have closed; return True if there were any. Gives up old ones."""
        written = len(self._done)
        try:
            self._export_closed_steps(closing=closing)
        except Exception as error:
            self._warn(f"export {type(error).__name__}", f"writing a step failed and is tried again: {error}")
        with self._lock:
            oldest = time.monotonic() - _GIVE_UP_SECONDS
            old = [step for step, noted in self._pending.items() if noted < oldest]
            for step in old:
                del self._pending[step]
        if old:
            self._warn("old", f"step {old[0]} is not exported: it was not written within an hour")
        return len(self._done) > written

    def _export_closed_steps(self, *, closing: bool) -> None:
        if self._client.attempt is None or not self._exporter.ready:
            return
        reader = self._reader or self._begin()
        with self._lock:
            pending = sorted(self._pending)
        while pending:
            reached = [step for step in pending if step < pending[0] + _STEPS_PER_READ]
            pending = pending[len(reached) :]
            for step, values in self._read(reader, reached[0], reached[-1]).items():
                if step not in reached or (closing and time.monotonic() > self._deadline):
                    continue
                if not self._exporter.write(step, values, closing=closing):
                    return
                with self._lock:
                    self._done.add(step)
                    self._pending.pop(step, None)

    def _begin(self) -> Reader:
        """Start the exporter with the page of the registered run; return the reader of its steps."""
        client, settings = self._client, self._client.settings
        self._exporter.start(run_url(settings.url, client.project, client.run_key))
        # It asks once, since steps are tried again, and has the limit of answers in a trainer.
        self._reader = Reader(
            settings.url,
            api_key=settings.api_key,
            timeout_seconds=settings.timeout_seconds,
            retry_seconds=0.0,
            max_answer_bytes=_MOST_ANSWER_BYTES,
        )
        return self._reader

    def _read(self, reader: Reader, first: int, last: int) -> dict[int, dict[str, float]]:
        """Return the values of the closed steps with first ≤ step ≤ last, in step order. Raises ServiceError."""
        run, attempt, measures = self._client.run_id, self._client.attempt, self._exporter.measures
        assert run is not None
        comparisons = (TRAINER_ROLLOUT, STEP_ROW)
        measured = reader.measurements(
            run, measures=measures, comparisons=comparisons, from_step=first, to_step=last, attempt=attempt
        )
        if not measured.columns.rows:
            return {}
        alerts = tuple(reader.alerts(run, states=(*STANDING, "resolved")))
        advice = reader.advice(run).advice
        return step_values(measured, alerts, advice if advice.attempt == attempt else None, measures, self._rules)

    def _warn(self, key: str, message: str) -> None:
        self._log.warning(f"{self._exporter.name} {key}", f"export to {self._exporter.name}: {message}")


def step_values(
    measured: Measurements,
    alerts: Sequence[AlertRecord],
    advice: Advice | None,
    measures: Sequence[str],
    rules: set[str],
) -> dict[int, dict[str, float]]:
    """Return the values of each measured step by name, in step order.

    `rules` has the rules that fired so far: each has a series that is 1 while it fires, else 0.
    """
    columns = measured.columns
    found: dict[int, dict[str, float]] = {int(step): {} for step in np.unique(columns["step"])}
    for name in measures:
        for step, value in zip(columns["step"].tolist(), columns.get(name, ()), strict=False):
            if np.isfinite(value):
                found[step][name] = float(value)
    missing = {each.step: float(each.expected_shards - each.shards) for each in measured.incomplete_steps}
    rules |= {alert.rule for alert in alerts}
    for step, values in found.items():
        values["missing_shards"] = missing.get(step, 0.0)
        firing = [alert for alert in alerts if _fires_at(alert, step)]
        for severity in SEVERITIES:
            values[f"alerts/{severity}"] = float(sum(alert.severity == severity for alert in firing))
        named = {alert.rule for alert in firing}
        values |= {f"alert/{rule}": float(rule in named) for rule in rules}
        if advice is not None:
            values |= {"lr_scale": advice.scale(step), "lr_scale_advised": advice.advised_scale(step)}
    return found


def _fires_at(alert: AlertRecord, step: int) -> bool:
    """Return True if the alert fires at `step`; one that a person resolved has no step at which it cleared."""
    if alert.step > step:
        return False
    return step < alert.cleared_step if alert.cleared_step is not None else alert.state in STANDING
