"""Life of a process of the service: what it spares itself at the start, its stop, and its end with its parent."""

import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing import connection, parent_process
from types import FrameType
from typing import Any

import pyarrow as pa

# Ctrl+C reaches a process from the terminal and again from its supervisor: that is one wish.
_SAME_WISH_SECONDS = 1.0


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


def end_with_parent() -> None:
    """From now on end this process as soon as its parent ends, without any clean-up; do nothing if it has none.

    A parent that is killed cannot stop its children, which would keep its port and its memory.
    """
    parent = parent_process()
    if parent is not None:
        threading.Thread(target=_end_after, args=(parent.sentinel,), daemon=True).start()


def _end_after(parent: int) -> None:
    connection.wait([parent])
    os._exit(1)


_YOUNG_OBJECTS = 20_000
"""Objects made before a collection looks at them; a small shard makes some thousands, which hold no cycles. Python's
own default is 700."""

_COLLECTIONS = 20
"""Collections of one generation before the next older one is looked at; Python's own default is 10."""


def spare_collections() -> None:
    """Keep what was imported out of later garbage collections, and collect less often.

    A full collection visits every object of the libraries and stops every request meanwhile; with a thousand polls
    that wait, whose objects are young for long, there were several at each change.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG_OBJECTS, _COLLECTIONS, _COLLECTIONS)


class _WithoutPandas:
    """Refuses to import pandas."""

    def find_spec(self, name: str, *_: Any) -> None:
        """Raise ModuleNotFoundError for pandas; leave other modules to the next finder."""
        if name == "pandas":
            raise ModuleNotFoundError("No module named 'pandas'", name=name)


def spare_pandas() -> None:
    """Make Arrow's first array without pandas, which it would import: up to a second of CPU time, and 50 MB.

    Nothing in the service uses pandas. What calls for it later still gets it.
    """
    refusing = _WithoutPandas()
    sys.meta_path.insert(0, refusing)
    try:
        pa.array([0])
    finally:
        sys.meta_path.remove(refusing)
