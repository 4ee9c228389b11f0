"""The long polls of one process: they hold neither a thread nor a database connection while they wait.

A change is announced (service/platform/changes/); one query then reads the versions of all changed runs that somebody
waits for. As a fallback the versions of all runs that are waited for are read every `READ_AGAIN_SECONDS`, more often
while the connection that hears of other processes' changes is away.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Annotated, Any, TypeVar, cast

from fastapi import Depends, Request
from sqlalchemy.orm import Session
from starlette.concurrency import run_in_threadpool

from foreshock_service.platform.changes.announcing import add_receiver, remove_receiver
from foreshock_service.platform.changes.listening import Listener
from foreshock_service.platform.database.session import Database
from foreshock_service.watch.long_polls.batches import BatchedReads
from foreshock_service.watch.long_polls.versions import RunVersion, read_versions

LONGEST_WAIT_SECONDS = 30
READ_AGAIN_SECONDS = 10.0
READ_AGAIN_UNHEARD_SECONDS = 1.0
"""While other processes are not heard."""

_RUNS_AT_ONCE = 500
# Then other requests have their turn: without the pause, all would join one read and go on in one turn of the loop.
_WOKEN_AT_ONCE = 50
_PAUSE_SECONDS = 0.003
# Of the reads of one kind of answer.
_THREADS = 2
Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")
_logger = logging.getLogger(__name__)


class Waiter:
    """One long poll."""

    def __init__(self, stopped: asyncio.Event) -> None:
        self._stopped = stopped
        self._woken = asyncio.Event()
        self._is_over: Callable[[RunVersion | None], bool] | None = None
        # What came after the waiter was made and before `until`.
        self._early: list[RunVersion | None] = []

    async def until(self, is_over: Callable[[RunVersion | None], bool], seconds: float) -> None:
        """Wait until the run's version satisfies `is_over`, the service stops, or `seconds` are over."""
        self._is_over = is_over
        if self._stopped.is_set() or any(map(is_over, self._early)):
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._woken.wait()

    def look(self, version: RunVersion | None) -> None:
        """End the wait if this version is what it waits for."""
        if self._is_over is None:
            self._early.append(version)
        elif self._is_over(version):
            self._woken.set()

    def end(self) -> None:
        """End the wait."""
        self._woken.set()


class LongPolls:
    """The waiters of one application, and the reads that they share. Used by the coroutines of one event loop."""

    def __init__(self, database: Database, listener: Listener) -> None:
        self._database = database
        self._listener = listener
        self._waiters: defaultdict[str, set[Waiter]] = defaultdict(set)
        self._versions = BatchedReads[str, RunVersion](self._read_versions, most=_RUNS_AT_ONCE)
        self._shared: dict[Callable[[Session, Any], Any], BatchedReads[Any, Any]] = {}
        self._changed: set[str] = set()
        self._news = asyncio.Event()
        self._stopped = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def count(self) -> int:
        """Number of polls that wait."""
        return sum(map(len, self._waiters.values()))

    @property
    def hears_other_processes(self) -> bool:
        """Return whether changes of other processes are heard at once, or there are none to hear."""
        return not self._listener.is_used or self._listener.is_listening

    @property
    def reconnects(self) -> int:
        """Return how often the connection that hears of changes was lost."""
        return self._listener.reconnects

    def start(self) -> None:
        """Begin to hear of changes."""
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.create_task(self._look_again_and_again())
        add_receiver(self._receive)
        self._listener.start()

    def release(self) -> None:
        """End every wait, now and from now on: the service stops."""
        self._stopped.set()
        for waiters in self._waiters.values():
            for waiter in waiters:
                waiter.end()

    async def stop(self) -> None:
        """End every wait and hear no more."""
        self.release()
        remove_receiver(self._receive)
        if self._task is not None:
            self._task.cancel()
        await run_in_threadpool(self._listener.stop)

    async def version(self, run_id: str) -> RunVersion | None:
        """Return the version that a run has now; None if there is no such run."""
        return await self._versions.get(run_id)

    async def read(self, function: Callable[[Session, Key], Value], key: Key) -> Value:
        """Return `function(session, key)`, shared by all who ask for it while another read runs."""
        if function not in self._shared:
            self._shared[function] = BatchedReads(partial(self._read_one, function), threads=_THREADS)
        return cast(Value, await self._shared[function].get(key))

    @contextmanager
    def waiter(self, run_id: str) -> Iterator[Waiter]:
        """Return a waiter of the run. Enter it before the version is read that it compares with."""
        waiter = Waiter(self._stopped)
        self._waiters[run_id].add(waiter)
        try:
            yield waiter
        finally:
            self._waiters[run_id].discard(waiter)
            if not self._waiters[run_id]:
                del self._waiters[run_id]

    def _receive(self, run_id: str | None) -> None:
        """Note a change; called from any thread."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._note, run_id)

    def _note(self, run_id: str | None) -> None:
        if run_id is None:
            self._changed.update(self._waiters)
        elif run_id in self._waiters:
            self._changed.add(run_id)
        if self._changed:
            self._news.set()

    async def _look_again_and_again(self) -> None:
        while True:
            try:
                async with asyncio.timeout(
                    READ_AGAIN_SECONDS if self.hears_other_processes else READ_AGAIN_UNHEARD_SECONDS
                ):
                    await self._news.wait()
            except TimeoutError:
                self._changed.update(self._waiters)
            self._news.clear()
            changed, self._changed = self._changed, set()
            try:
                versions = await asyncio.gather(*(self._versions.get(run_id) for run_id in changed))
            except Exception:
                # Nothing is lost: the fallback looks at every run.
                _logger.exception("the versions of runs cannot be read; they are read again")
                await asyncio.sleep(READ_AGAIN_UNHEARD_SECONDS)
                self._changed |= changed
                continue
            for run_id, version in zip(changed, versions, strict=True):
                for number, waiter in enumerate(tuple(self._waiters.get(run_id, ())), start=1):
                    waiter.look(version)
                    if number % _WOKEN_AT_ONCE == 0:
                        await asyncio.sleep(_PAUSE_SECONDS)

    def _read_versions(self, run_ids: Collection[str]) -> dict[str, RunVersion]:
        with self._database.read() as session:
            return read_versions(session, run_ids)

    def _read_one(self, function: Callable[[Session, Key], Value], keys: Collection[Key]) -> dict[Key, Value]:
        with self._database.read() as session:
            return {key: function(session, key) for key in keys}


async def _long_polls_of(request: Request) -> LongPolls:
    return cast(LongPolls, request.app.state.long_polls)


LongPollsOfApp = Annotated[LongPolls, Depends(_long_polls_of)]
