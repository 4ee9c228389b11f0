"""The base of readers and operators: requests, a connection, retries and remembered answers.

`described.py` makes their methods, once for `Caller` and `AsyncCaller`.
"""

import enum
import json
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Generic, Literal, Self, TypeVar

import httpx

from foreshock.client.connection import (
    AsyncServiceConnection,
    QueryValue,
    ServiceConnection,
    configured,
    wrong_service,
)
from foreshock.errors import ServiceUnavailable, WrongService
from foreshock.retry import Backoff, retry, retry_async

Answer = TypeVar("Answer")
Item = TypeVar("Item")
HttpMethod = Literal["GET", "POST", "PUT", "PATCH", "DELETE"]
Answer_co = TypeVar("Answer_co", covariant=True)
Item_co = TypeVar("Item_co", covariant=True)

Query = Sequence[tuple[str, QueryValue]]

# The service's limit.
ITEMS_ON_A_PAGE = 500


class Unchanged(enum.Enum):
    """The kind of `UNCHANGED`: the default of fields in which None means that a value is removed."""

    UNCHANGED = "unchanged"

    def __repr__(self) -> str:
        return self.name


UNCHANGED: Final[Literal[Unchanged.UNCHANGED]] = Unchanged.UNCHANGED


@dataclass(frozen=True, slots=True)
class Request(Generic[Answer_co]):
    """One request. `read` makes the answer from the body; it raises KeyError, TypeError or ValueError if it cannot.

    `in_project`: the client's project is a parameter of the request. `wait_seconds`: a long poll, which is answered
    once the answer differs from the one that the reader has, or after that time. `content` is a JSON body.
    `is_repeatable`: the same request twice has the effect of one, so that it may be sent again after a failure.
    """

    path: str
    query: Query
    read: Callable[[bytes], Answer_co]
    accept: str = "application/json"
    in_project: bool = True
    wait_seconds: float = 0.0
    method: HttpMethod = "GET"
    content: bytes | None = None
    is_repeatable: bool = True

    @property
    def headers(self) -> dict[str, str]:
        """The headers of the request."""
        kind = {} if self.content is None else {"Content-Type": "application/json"}
        return {"Accept": self.accept, **kind}

    def parameters(self, project: str | None) -> list[tuple[str, QueryValue]]:
        """Return the parameters of the request, with the client's project if it is one of them."""
        wait = self.wait_seconds or None
        return [*self.query, ("project", project if self.in_project else None), ("wait", wait)]

    @property
    def asked(self) -> object:
        """The key of the answer: everything that it depends on, so not the time to wait."""
        return self.path, tuple(self.query), self.accept


Page = tuple[tuple[Item, ...], str | None]
"""The items of a page, and the cursor of the next one."""


@dataclass(frozen=True, slots=True)
class Listing(Generic[Item_co]):
    """A paged list; `read` makes an item."""

    path: str
    query: Query
    read: Callable[[Mapping[str, Any]], Item_co]
    in_project: bool = True
    is_paged: bool = True

    def page(self, cursor: str | None) -> Request[Page[Item_co]]:
        """Return the request of the page at `cursor`; None: the first."""

        def read(body: bytes) -> Page[Item_co]:
            value = json.loads(body)
            return tuple(self.read(item) for item in value["items"]), value.get("next_cursor")

        query = [*self.query, ("limit", ITEMS_ON_A_PAGE), ("cursor", cursor)] if self.is_paged else self.query
        return Request(self.path, query, read, in_project=self.in_project)


REMEMBERED_BYTES = 16 << 20
"""Largest size of all remembered answers; an answer of more than a quarter of it is not remembered."""


class RememberedAnswers:
    """The newest answers with their entity tags, so that one that has not changed is not sent again.

    The least recently used one is dropped first.
    """

    def __init__(self, most_bytes: int = REMEMBERED_BYTES) -> None:
        self._most_bytes = most_bytes
        self._held: OrderedDict[object, tuple[str, bytes]] = OrderedDict()
        self._bytes = 0

    def headers(self, request: object) -> Mapping[str, str]:
        """Return the header that asks for a body only if it has changed; none for a request without a remembered
        answer."""
        held = self._held.get(request)
        return {} if held is None else {"If-None-Match": held[0]}

    def body(self, request: object, response: httpx.Response) -> bytes:
        """Return the body of an answer, the remembered one for 304. Raises ValueError if none is remembered."""
        if response.status_code == httpx.codes.NOT_MODIFIED:
            if request not in self._held:
                raise ValueError("304 without a request for it")
            self._held.move_to_end(request)
            return self._held[request][1]
        body, tag = response.content, response.headers.get("ETag")
        self._forget(request)
        if tag is not None and len(body) <= self._most_bytes // 4:
            self._held[request] = (tag, body)
            self._bytes += len(body)
            while self._bytes > self._most_bytes:
                self._forget(next(iter(self._held)))
        return body

    def _forget(self, request: object) -> None:
        held = self._held.pop(request, None)
        if held is not None:
            self._bytes -= len(held[1])


class _Settings:
    """The address, key and project of a caller, how long it waits and retries, and the answers that it remembers."""

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
        address, key = configured(url, api_key)
        self.settings: dict[str, Any] = {
            "url": address,
            "project": project,
            "api_key": key,
            "timeout_seconds": timeout_seconds,
            "retry_seconds": retry_seconds,
        }
        self._remembered = RememberedAnswers()
        self._connect(address, key, timeout_seconds)

    def _connect(self, url: str, api_key: str | None, timeout_seconds: float) -> None:
        raise NotImplementedError

    def _arguments(self, request: Request[Any]) -> dict[str, Any]:
        """Return what a connection's `request` takes beside method and path."""
        known = self._remembered.headers(request.asked) if request.method == "GET" else {}
        return {
            "query": request.parameters(self.settings["project"]),
            "content": request.content,
            "headers": {**request.headers, **known},
            "timeout_seconds": self.settings["timeout_seconds"] + request.wait_seconds,
        }

    def _retrying(self, request: Request[Any]) -> dict[str, Any]:
        """Return how a request is retried."""
        return {
            "backoff": Backoff(first_seconds=0.25, longest_seconds=5.0),
            "is_retryable": _is_retryable if request.is_repeatable else _was_not_begun,
            "deadline_seconds": self.settings["retry_seconds"],
        }

    def _read(self, request: Request[Answer], response: httpx.Response) -> Answer:
        remembered = self._remembered if request.method == "GET" else None
        return _read_answer(self.settings["url"], request, response, remembered)


class Caller(_Settings):
    """Sends the requests that its methods describe. Use one per thread."""

    def _connect(self, url: str, api_key: str | None, timeout_seconds: float) -> None:
        self._connection = ServiceConnection(url, api_key, timeout_seconds=timeout_seconds)

    def send(self, request: Request[Answer]) -> Answer:
        """Return the answer to a request. Raises ServiceError."""

        def attempt() -> httpx.Response:
            return self._connection.request(request.method, request.path, **self._arguments(request))

        return self._read(request, retry(attempt, **self._retrying(request)))

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


class AsyncCaller(_Settings):
    """Sends the requests that its methods describe, for many tasks of one event loop."""

    def _connect(self, url: str, api_key: str | None, timeout_seconds: float) -> None:
        self._connection = AsyncServiceConnection(url, api_key, timeout_seconds=timeout_seconds)

    async def send(self, request: Request[Answer]) -> Answer:
        """Return the answer to a request. Raises ServiceError."""

        async def attempt() -> httpx.Response:
            return await self._connection.request(request.method, request.path, **self._arguments(request))

        return self._read(request, await retry_async(attempt, **self._retrying(request)))

    async def items(self, listing: Listing[Item]) -> AsyncIterator[Item]:
        """Yield the items of all pages. Raises ServiceError."""
        cursor: str | None = None
        while True:
            items, cursor = await self.send(listing.page(cursor))
            for item in items:
                yield item
            if cursor is None:
                return

    async def close(self) -> None:
        """Close the connection."""
        await self._connection.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


def answer_of(connection: ServiceConnection, request: Request[Answer], project: str | None = None) -> Answer:
    """Return the answer to a GET, asked for once. Raises ServiceError."""
    response = connection.request("GET", request.path, query=request.parameters(project), headers=request.headers)
    return _read_answer(connection.url, request, response, None)


def items_of(connection: ServiceConnection, listing: Listing[Item], project: str | None = None) -> Iterator[Item]:
    """Yield the items of all pages, each asked for once. Raises ServiceError."""
    return _items(lambda request: answer_of(connection, request, project), listing)


def _items(get: Callable[[Request[Page[Item]]], Page[Item]], listing: Listing[Item]) -> Iterator[Item]:
    cursor: str | None = None
    while True:
        items, cursor = get(listing.page(cursor))
        yield from items
        if cursor is None:
            return


def _read_answer(
    url: str, request: Request[Answer], response: httpx.Response, remembered: RememberedAnswers | None
) -> Answer:
    """Return the answer in the response, or the remembered one for 304. Raises WrongService if it cannot be read."""
    try:
        body = response.content if remembered is None else remembered.body(request.asked, response)
        return request.read(body)
    except json.JSONDecodeError as error:
        raise wrong_service(url) from error
    except (KeyError, TypeError, ValueError) as error:
        problem = f"{type(error).__name__}: {error}"
        raise WrongService(
            f"this release cannot read the answer of {url} to {request.path} ({problem}); check FORESHOCK_URL, and "
            "that client and service are at most one release apart"
        ) from error


def _is_retryable(error: Exception) -> bool:
    """Return True if the same request may succeed later; one to a wrong address will not."""
    return isinstance(error, ServiceUnavailable) and not isinstance(error, WrongService)


def _was_not_begun(error: Exception) -> bool:
    """Return True if the service has certainly not begun the request: no connection, or 429."""
    never_sent = isinstance(error.__cause__, httpx.ConnectError | httpx.ConnectTimeout)
    too_many = isinstance(error, ServiceUnavailable) and error.status == httpx.codes.TOO_MANY_REQUESTS
    return never_sent or too_many
