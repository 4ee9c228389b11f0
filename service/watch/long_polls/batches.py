"""Share reads between coroutines: those that ask for something while a read runs are answered together by the next one.

A value is always read after it was asked for, so it is never older than the request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Hashable, Mapping
from typing import Generic, TypeVar

from anyio import CapacityLimiter, to_thread

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class BatchedReads(Generic[Key, Value]):
    """Reads of the coroutines of one event loop, by a function that reads up to `most` keys at a time.

    `read` runs in `threads` threads of its own, so it waits for no other request. A key that is absent from its result
    has the value None.
    """

    def __init__(
        self, read: Callable[[Collection[Key]], Mapping[Key, Value]], *, most: int = 1, threads: int = 1
    ) -> None:
        self._read = read
        self._most = most
        self._threads = threads
        self._asked: dict[Key, asyncio.Future[Value | None]] = {}
        self._readers: set[asyncio.Task[None]] = set()
        self._limiter = CapacityLimiter(threads)

    async def get(self, key: Key) -> Value | None:
        """Return the value of a key; raises what `read` raises."""
        if key not in self._asked:
            self._asked[key] = asyncio.get_running_loop().create_future()
        answer = self._asked[key]
        if len(self._readers) < self._threads:
            reader = asyncio.create_task(self._read_all())
            self._readers.add(reader)
            reader.add_done_callback(self._readers.discard)
        # The others that share it go on waiting if this one is cancelled.
        return await asyncio.shield(answer)

    async def _read_all(self) -> None:
        while self._asked:
            keys = list(self._asked)[: self._most]
            answers = {key: self._asked.pop(key) for key in keys}
            try:
                found = await to_thread.run_sync(self._read, keys, limiter=self._limiter, abandon_on_cancel=True)
            except BaseException as error:
                for answer in answers.values():
                    if isinstance(error, Exception):
                        answer.set_exception(error)
                        # Marked as seen: nobody may be waiting any more.
                        answer.exception()
                    else:
                        answer.cancel()
                if not isinstance(error, Exception):
                    raise
                continue
            for key, answer in answers.items():
                answer.set_result(found.get(key))
