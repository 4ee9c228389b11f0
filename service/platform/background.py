"""Periodic tasks of the service, such as closing steps whose shards are overdue."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

_logger = logging.getLogger(__name__)


class Sweeper:
    """Thread that runs every task each `interval_seconds`; a task that raises is logged and runs again."""

    def __init__(
        self, interval_seconds: float, tasks: Sequence[Callable[[], object]], name: str = "foreshock-sweeper"
    ) -> None:
        self._interval = interval_seconds
        self._tasks = tuple(tasks)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread; the first round comes after one interval."""
        self._thread.start()

    def stop(self) -> None:
        """Finish the current round, then end the thread."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()

    def _loop(self) -> None:
        while not self._stopping.wait(self._interval):
            for task in self._tasks:
                try:
                    task()
                except Exception:
                    _logger.exception("a periodic task failed; it runs again in %s s", self._interval)
