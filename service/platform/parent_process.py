"""End a process of the service with the one that started it, however that one ends."""

from __future__ import annotations

import os
import threading
from multiprocessing import connection, parent_process


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
