"""The exporters of one client: chosen by the argument `export` or by FORESHOCK_EXPORT, one thread each."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from foreshock.client.connection import ServiceConnection
from foreshock.client.log_once import LogOnce
from foreshock.client.status import DeliveryStatus
from foreshock.errors import ConfigurationError

if TYPE_CHECKING:
    from foreshock.exporters.export_thread import ExportThread
    from foreshock.exporters.exporter import ExportedRun, Exporter
    from foreshock.exporters.names import Export

__all__ = ["Exports"]

_VARIABLE = "FORESHOCK_EXPORT"


class Exports:
    """Starts the exporters with the first step, and closes them. `foreshock.exporters` is imported only if used."""

    def __init__(self, find_run: Callable[[], ExportedRun | None], connect: Callable[[], ServiceConnection]) -> None:
        self._find_run = find_run
        self._connect = connect
        self._log = LogOnce("foreshock.exporters")
        self._exporters: list[Exporter] = []
        self._threads: list[ExportThread] = []

    def choose(self, export: Export | None) -> None:
        """Make the exporters of the argument, or of the environment if it is None.

        Raises ConfigurationError for the argument; an error in the environment is logged, since rollouts matter more.
        """
        chosen: Export = os.environ.get(_VARIABLE, "") if export is None else export
        if not chosen:
            return
        from foreshock.exporters.names import make_exporters

        try:
            self._exporters = make_exporters(chosen)
        except ConfigurationError as error:
            if export is not None:
                raise
            self._log.warning("environment", f"{_VARIABLE} is ignored, nothing is exported: {error}")

    def note_step(self, step: int) -> None:
        """Export `step` once it has closed; returns at once."""
        if self._exporters and not self._threads:
            self._start()
        for thread in self._threads:
            thread.note_step(step)

    def close(self, timeout_seconds: float, status: DeliveryStatus) -> None:
        """Write the steps that the service has, at most for so long; do not wait for steps it will not get now."""
        threads, self._threads, self._exporters = self._threads, [], []
        if not threads:
            return
        atexit.unregister(self._close_at_exit)
        seconds = 0.0 if status.undelivered else timeout_seconds
        for thread in threads:
            thread.begin_close(seconds)
        for thread in threads:
            thread.join()

    def _start(self) -> None:
        from foreshock.exporters.export_thread import ExportThread

        self._threads = [ExportThread(each, self._find_run, self._connect, self._log) for each in self._exporters]
        atexit.register(self._close_at_exit)

    def _close_at_exit(self) -> None:
        self.close(2.0, DeliveryStatus())
