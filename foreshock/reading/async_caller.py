"""The async twin of `foreshock.reading.caller`: answers are awaited, lists are async iterators."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from foreshock.client.async_connection import AsyncServiceConnection
from foreshock.reading.remembered import RememberedAnswers
from foreshock.reading.request import Listing, Request
from foreshock.reading.shared import CallerSettings, describe_method, read_answer, retryable_of
from foreshock.retry import retry_async

__all__ = ["AsyncCaller", "call", "listing"]

Arguments = ParamSpec("Arguments")
Answer = TypeVar("Answer")
Item = TypeVar("Item")


class AsyncCaller:
    """Sends the requests that its methods describe, for many tasks of one event loop."""

    def __init__(
        self,
        url: str | None = None,
        project: str | None = None,
        *,
        api_key: str | None = None,
        timeout_seconds: float = 30.0,
        retry_seconds: float = 10.0,
    ) -> None:
        """Prepare the connection; nothing is sent yet. Raises ConfigurationError if `url` is not an http(s) address."""
        self.settings = CallerSettings(url, project, api_key, timeout_seconds, retry_seconds)
        self._remembered = RememberedAnswers()
        self._connection = AsyncServiceConnection(
            self.settings.url, self.settings.api_key, timeout_seconds=timeout_seconds
        )

    async def send(self, request: Request[Answer]) -> Answer:
        """Return the answer to a request. Raises ServiceError."""
        remembered = self._remembered if request.is_read else None
        response = await retry_async(
            lambda: self._connection.request(
                request.method, request.path, **self.settings.arguments(request, remembered)
            ),
            self.settings.backoff(),
            is_retryable=retryable_of(request),
            deadline_seconds=self.settings.retry_seconds,
        )
        return read_answer(self._connection.url, request, response, remembered)

    async def items(self, listing: Listing[Item]) -> AsyncIterator[Item]:
        """Yield the items of all pages. Raises ServiceError."""
        page = await self.send(listing.page(None))
        for item in page.items:
            yield item
        while page.next_cursor is not None:
            page = await self.send(listing.page(page.next_cursor))
            for item in page.items:
                yield item

    async def close(self) -> None:
        """Close the connection."""
        await self._connection.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


def call(
    request: Callable[Arguments, Request[Answer]],
) -> Callable[Concatenate[AsyncCaller, Arguments], Coroutine[Any, Any, Answer]]:
    """Return the method that sends the request which a function describes."""

    async def method(caller: AsyncCaller, /, *arguments: Arguments.args, **named: Arguments.kwargs) -> Answer:
        return await caller.send(request(*arguments, **named))

    describe_method(method, request)
    return method


def listing(
    request: Callable[Arguments, Listing[Item]],
) -> Callable[Concatenate[AsyncCaller, Arguments], AsyncIterator[Item]]:
    """Return the method that yields the items of the list which a function describes."""

    def method(caller: AsyncCaller, /, *arguments: Arguments.args, **named: Arguments.kwargs) -> AsyncIterator[Item]:
        return caller.items(request(*arguments, **named))

    describe_method(method, request)
    return method
