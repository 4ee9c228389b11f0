"""The end of a service process: what must know of it at once, while requests in flight are finished."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

# Ctrl+C reaches a process from the terminal and again from its supervisor: that is one wish.
_SAME_WISH_SECONDS = 1.0


class Stopping:
    """Set when the service is asked to stop, before it waits for the requests in flight."""

    def __init__(self) -> None:
        self._callbacks: list[Callable[[], None]] = []
        self._begun = False

    @property
    def has_begun(self) -> bool:
        """Return whether the service stops: waits end now."""
        return self._begun

    def on_begin(self, callback: Callable[[], None]) -> None:
        """Call `callback` in the event loop's thread when the service begins to stop."""
        self._callbacks.append(callback)

    def begin(self) -> None:
        """Begin to stop; only the first call does something."""
        if not self._begun:
            self._begun = True
            for callback in self._callbacks:
                callback()


def handle_signals(begin: Callable[[], object]) -> None:
    """Call `begin` at the first SIGTERM or SIGINT, and make a second one end the process at once.

    uvicorn tells the application that it stops only after the requests in flight, and so after the long polls.
    `begin` is called inside the signal handler. Does nothing outside of the main thread, which alone handles signals.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    first_at: list[float] = []

    def wrap(handler: Any) -> Callable[[int, FrameType | None], None]:
        def handle(number: int, frame: FrameType | None) -> None:
            first_at.append(time.monotonic())
            if first_at[-1] - first_at[0] >= _SAME_WISH_SECONDS:
                os._exit(1)
            begin()
            if callable(handler):
                handler(number, frame)

        return handle

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, wrap(signal.getsignal(number)))
