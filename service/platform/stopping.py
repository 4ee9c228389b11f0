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
_FORCED_SECONDS = 2.0


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
    """Call `begin` at the first SIGTERM or SIGINT, and make a second one end the process within seconds.

    The first one keeps its handler's meaning: uvicorn's tells open connections that the service stops, and so not the
    polls of clients that have gone. `begin` is called inside the signal handler. Does nothing outside of the main
    thread, which alone may handle signals.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    first_at: list[float] = []

    def wrap(handler: Any) -> Callable[[int, FrameType | None], None]:
        def handle(number: int, frame: FrameType | None) -> None:
            first_at.append(time.monotonic())
            begin()
            if callable(handler):
                handler(number, frame)
            if first_at[-1] - first_at[0] >= _SAME_WISH_SECONDS:
                # uvicorn takes a second SIGINT, not a second SIGTERM, as the wish to wait for nothing.
                if callable(handler):
                    handler(signal.SIGINT, frame)
                ending = threading.Timer(_FORCED_SECONDS, os._exit, (1,))
                ending.daemon = True
                ending.start()

        return handle

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, wrap(signal.getsignal(number)))
