"""Places for uploads: a bounded number at a time, in threads of their own.

The threads that serve every other request stay free while uploads wait for a decoder. An upload beyond the bound is
refused before its body is read, so that the client sends it again later.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import ParamSpec, TypeVar

from anyio import CapacityLimiter, to_thread

from service.platform.problem import ProblemError

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class UploadsBusy(ProblemError):
    """Full: as many uploads as the service takes at a time are being received, decoded or stored."""

    status = 503


class UploadPlaces:
    """The places of one application. Used by the coroutines of one event loop."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._taken = 0
        # A place needs one thread at a time.
        self._limiter = CapacityLimiter(most)

    @asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """Hold a place; raises UploadsBusy if there is none."""
        if self._taken >= self._most:
            raise UploadsBusy(
                f"{self._most} uploads are under way: try again (FORESHOCK_DECODE_QUEUE bounds them)",
                headers={"Retry-After": "1"},
            )
        self._taken += 1
        try:
            yield
        finally:
            self._taken -= 1

    async def run(
        self, function: Callable[Arguments, Result], *arguments: Arguments.args, **named: Arguments.kwargs
    ) -> Result:
        """Run a part of an upload that has a place in one of the threads."""
        return await to_thread.run_sync(partial(function, *arguments, **named), limiter=self._limiter)
