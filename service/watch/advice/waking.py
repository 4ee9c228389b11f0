"""Waking the long polls of this process once a change is durable; other processes' polls look again by themselves."""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy.orm import Session

from service.platform.database.hooks import after_commit

_Sleeper = tuple[asyncio.AbstractEventLoop, asyncio.Event]
_lock = threading.Lock()
_sleepers: defaultdict[str, set[_Sleeper]] = defaultdict(set)


def wake_after_commit(session: Session, run_id: str) -> None:
    """Wake whoever waits for news of this run once the session's transaction is committed."""
    after_commit(session, lambda: wake(run_id))


def wake(run_id: str) -> None:
    """Wake whoever waits for news of this run; may be called from any thread."""
    with _lock:
        sleepers = list(_sleepers.get(run_id, ()))
    for loop, event in sleepers:
        if not loop.is_closed():
            loop.call_soon_threadsafe(event.set)


@contextmanager
def sleeper(run_id: str) -> Iterator[asyncio.Event]:
    """An event of the running loop that is set whenever the run has news; make it before looking at the state."""
    entry = (asyncio.get_running_loop(), asyncio.Event())
    with _lock:
        _sleepers[run_id].add(entry)
    try:
        yield entry[1]
    finally:
        with _lock:
            _sleepers[run_id].discard(entry)
            if not _sleepers[run_id]:
                del _sleepers[run_id]
