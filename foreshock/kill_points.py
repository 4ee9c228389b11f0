"""Points at which a process ends itself by SIGKILL, as a power cut would, for tests of crashes.

    FORESHOCK_KILL_AT=ingest.after-commit:3

The process ends when it passes the named point for the third time (without a number: the first). The variable is read
once, when this module is imported. Without it, passing a point costs one comparison. `make bench-faults` uses it.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from typing import Literal, get_args

__all__ = ["KILL_POINTS", "VARIABLE", "KillPoint", "passed"]

VARIABLE = "FORESHOCK_KILL_AT"

KillPoint = Literal[
    # The service, in the order of an upload.
    "decoder.measured",
    "store.file-written",
    "store.file-synced",
    "store.file-renamed",
    "ingest.before-transaction",
    "ingest.before-commit",
    "ingest.after-commit",
    "steps.before-fold",
    "steps.folded",
    "steps.before-commit",
    "scores.before-transaction",
    "scores.before-commit",
    "scores.published",
    # Any transaction of the service.
    "database.before-commit",
    "database.after-commit",
    # The client, in the order of a delivery.
    "client.body-spooled",
    "client.spooled",
    "client.before-send",
    "client.answered",
    "client.metadata-removed",
]

KILL_POINTS: tuple[KillPoint, ...] = get_args(KillPoint)


class _Armed:
    """The point at which this process ends, and how often it has to pass it before."""

    def __init__(self, point: str, passes: int) -> None:
        self.point = point
        self._left = passes
        self._lock = threading.Lock()

    def count(self) -> None:
        """Count one pass; end the process at the last one."""
        with self._lock:
            self._left -= 1
            if self._left <= 0:
                os.kill(os.getpid(), signal.SIGKILL)


def _read(text: str) -> _Armed | None:
    if not text:
        return None
    point, _, passes = text.partition(":")
    if point not in KILL_POINTS or not (passes or "1").isdecimal():
        logging.getLogger(__name__).warning(
            "%s=%s is ignored: expected one of %s, with a number such as :2", VARIABLE, text, ", ".join(KILL_POINTS)
        )
        return None
    return _Armed(point, int(passes or "1"))


_armed = _read(os.environ.get(VARIABLE, ""))


def passed(point: KillPoint) -> None:
    """End the process if `FORESHOCK_KILL_AT` names this point and it was passed as often as that says."""
    if _armed is not None and _armed.point == point:
        _armed.count()
