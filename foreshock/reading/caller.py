"""What `Reader` and `Operator` are made of: a connection, retries, and methods made of the functions of an `api.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Concatenate, ParamSpec, Self, TypeVar

from foreshock.client.connection import ServiceConnection
from foreshock.reading.remembered import RememberedAnswers
from foreshock.reading.request import ItemPage, Listing, Request
from foreshock.reading.shared import CallerSettings, describe_method, read_answer, retryable_of
from foreshock.retry import retry

__all__ = ["Caller", "answer_of", "call", "items_of", "listing"]

Arguments = ParamSpec("Arguments")
Answer = TypeVar("Answer")
Item = TypeVar("Item")


class Caller:
    """Sends the requests that its methods describe. Use one per thread."""

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
        self._connection = ServiceConnection(self.settings.url, self.settings.api_key, timeout_seconds=timeout_seconds)

    def send(self, request: Request[Answer]) -> Answer:
        """Return the answer to a request. Raises ServiceError."""
        remembered = self._remembered if request.is_read else None
        response = retry(
            lambda: self._connection.request(
                request.method, request.path, **self.settings.arguments(request, remembered)
            ),
            self.settings.backoff(),
            is_retryable=retryable_of(request),
            deadline_seconds=self.settings.retry_seconds,
        )
        return read_answer(self._connection.url, request, response, remembered)

    def items(self, listing: Listing[Item]) -> Iterator[Item]:
        """Yield the items of all pages. Raises ServiceError."""
        return _items(self.send, listing)

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def call(request: Callable[Arguments, Request[Answer]]) -> Callable[Concatenate[Caller, Arguments], Answer]:
    """Return the method that sends the request which a function describes."""

    def method(caller: Caller, /, *arguments: Arguments.args, **named: Arguments.kwargs) -> Answer:
        return caller.send(request(*arguments, **named))

    describe_method(method, request)
    return method


def listing(request: Callable[Arguments, Listing[Item]]) -> Callable[Concatenate[Caller, Arguments], Iterator[Item]]:
    """Return the method that yields the items of the list which a function describes."""

    def method(caller: Caller, /, *arguments: Arguments.args, **named: Arguments.kwargs) -> Iterator[Item]:
        return caller.items(request(*arguments, **named))

    describe_method(method, request)
    return method


def answer_of(connection: ServiceConnection, request: Request[Answer], project: str | None = None) -> Answer:
    """Return the answer to a GET, asked for once. Raises ServiceError."""
    response = connection.request("GET", request.path, query=request.parameters(project), headers=request.headers)
    return read_answer(connection.url, request, response)


def items_of(connection: ServiceConnection, listing: Listing[Item], project: str | None = None) -> Iterator[Item]:
    """Yield the items of all pages, each asked for once. Raises ServiceError."""
    return _items(lambda request: answer_of(connection, request, project), listing)


def _items(get: Callable[[Request[ItemPage[Item]]], ItemPage[Item]], listing: Listing[Item]) -> Iterator[Item]:
    page = get(listing.page(None))
    yield from page.items
    while page.next_cursor is not None:
        page = get(listing.page(page.next_cursor))
        yield from page.items
