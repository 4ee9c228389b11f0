"""Long polls: wait for a change of a run without holding a thread or a database connection.

A change in this process wakes its polls as soon as it is committed. Changes of other processes are seen when a poll
reads the state again, every `READ_AGAIN_SECONDS`.
"""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from sqlalchemy.orm import Session
from starlette.concurrency import run_in_threadpool

from service.platform.database.hooks import after_commit
from service.platform.etag import matches

READ_AGAIN_SECONDS = 2.0

_Waiter = tuple[asyncio.AbstractEventLoop, asyncio.Event]
_lock = threading.Lock()
_waiters: defaultdict[str, set[_Waiter]] = defaultdict(set)


def wake_after_commit(session: Session, run_id: str) -> None:
    """Wake the polls that wait for this run once the session's transaction is committed."""
    after_commit(session, lambda: wake(run_id))


def wake(run_id: str) -> None:
    """Wake the polls that wait for this run; may be called from any thread."""
    with _lock:
        waiters = list(_waiters.get(run_id, ()))
    for loop, changed in waiters:
        if not loop.is_closed():
            loop.call_soon_threadsafe(changed.set)


async def wait_for_change(read_etag: Callable[[], str], run_id: str, if_none_match: str | None, seconds: float) -> bool:
    """Wait up to `seconds` while `read_etag()` still matches `if_none_match`; True as soon as it differs.

    `read_etag` runs in a thread; what it raises is raised here.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds
    with waiter(run_id) as changed:
        while True:
            # Cleared before reading: a change that comes after the read sets it again.
            changed.clear()
            if not matches(if_none_match, await run_in_threadpool(read_etag)):
                return True
            left = deadline - loop.time()
            if left <= 0:
                return False
            try:
                await asyncio.wait_for(changed.wait(), min(left, READ_AGAIN_SECONDS))
            except TimeoutError:
                continue


@contextmanager
def waiter(run_id: str) -> Iterator[asyncio.Event]:
    """Return an event of the running loop that is set at each change of the run; enter it before reading the state."""
    entry = (asyncio.get_running_loop(), asyncio.Event())
    with _lock:
        _waiters[run_id].add(entry)
    try:
        yield entry[1]
    finally:
        with _lock:
            _waiters[run_id].discard(entry)
            if not _waiters[run_id]:
                del _waiters[run_id]
