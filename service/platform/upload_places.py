"""Places for uploads: a bounded number at a time, of which one key gets a part, in threads of their own.

The threads that serve every other request stay free while uploads wait for a decoder. An upload beyond the bound is
refused before its body is read, so that the client sends it again later.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import ParamSpec, TypeVar

from anyio import CapacityLimiter, to_thread

from foreshock_service.platform.keys.limits import TooManyRequests
from foreshock_service.platform.problem import ProblemError

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class UploadsBusy(ProblemError):
    """Full: as many uploads as the service takes at a time are being received, decoded or stored."""

    status = 503
    problem_type = "uploads-busy"


class UploadPlaces:
    """The places of one application. Used by the coroutines of one event loop."""

    def __init__(self, most: int, *, most_of_one_key: int = 0) -> None:
        self._most = most
        self._most_of_one_key = most_of_one_key
        self._taken = 0
        self._taken_by: Counter[str] = Counter()
        # A place needs one thread at a time.
        self._limiter = CapacityLimiter(most)

    @property
    def most(self) -> int:
        """Return how many there are."""
        return self._most

    @property
    def taken(self) -> int:
        """Return how many are taken."""
        return self._taken

    @asynccontextmanager
    async def place(self, key_id: str | None = None) -> AsyncIterator[None]:
        """Hold a place; raises UploadsBusy if there is none, TooManyRequests if the key has its part already."""
        if key_id is not None and 0 < self._most_of_one_key <= self._taken_by[key_id]:
            raise TooManyRequests(
                f"this key has {self._most_of_one_key} uploads under way: try again (FORESHOCK_KEY_UPLOADS of the "
                "service bounds them)",
                headers={"Retry-After": "1"},
            )
        if self._taken >= self._most:
            raise UploadsBusy(
                f"{self._most} uploads are under way: try again (FORESHOCK_DECODE_QUEUE bounds them)",
                headers={"Retry-After": "1"},
            )
        self._taken += 1
        if key_id is not None:
            self._taken_by[key_id] += 1
        try:
            yield
        finally:
            self._taken -= 1
            if key_id is not None:
                self._taken_by[key_id] -= 1

    async def run(
        self, function: Callable[Arguments, Result], *arguments: Arguments.args, **named: Arguments.kwargs
    ) -> Result:
        """Run a part of an upload that has a place in one of the threads."""
        return await to_thread.run_sync(partial(function, *arguments, **named), limiter=self._limiter)
