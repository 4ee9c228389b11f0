"""Lifecycle of a service process: a cheaper start, its stop on signals, and its end with its parent."""

import gc
import os
import signal
import threading
import time
from collections.abc import Callable
from multiprocessing import connection, parent_process
from types import FrameType
from typing import Any

# Ctrl+C reaches a process twice, from the terminal and from its supervisor: within this time both count as one.
_SAME_WISH_SECONDS = 1.0


def handle_signals(begin: Callable[[], object]) -> None:
    """Call `begin` at the first SIGTERM or SIGINT; a second signal ends the process at once.

    uvicorn itself notifies the application only after the requests in flight, and so after the long polls. `begin` is
    called inside the signal handler. Does nothing outside the main thread, because only that handles signals.
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


def end_with_parent() -> None:
    """End this process, without clean-up, as soon as its parent ends; do nothing if it has no parent.

    A killed parent cannot stop its children, which would keep the port and their memory.
    """
    parent = parent_process()
    if parent is not None:
        threading.Thread(target=lambda: (connection.wait([parent.sentinel]), os._exit(1)), daemon=True).start()


_YOUNG_OBJECTS = 20_000
"""New objects after which the youngest generation is collected. A small shard makes a few thousand, without cycles.
Python's default is 700."""

_COLLECTIONS = 20
"""Collections of one generation after which the next older one is collected. Python's default is 10."""


def spare_collections() -> None:
    """Exclude all present objects from later garbage collections, and collect less often.

    A full collection visits every object of the libraries and stops all requests meanwhile. With a thousand waiting
    polls, whose objects stay young for long, each change caused several full collections.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG_OBJECTS, _COLLECTIONS, _COLLECTIONS)
