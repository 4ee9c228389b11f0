"""HTTP connections to the service, for threads and for event loops: the one place of address, headers and errors.

Used by the client, the advice feed, readers and operators, the commands and the workers. Every failure is a
ServiceError: ServiceUnavailable, WrongService, Unauthorized or Rejected (`foreshock/errors.py`).
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from types import TracebackType
from typing import Any, cast
from urllib.parse import urlsplit

import httpx

from foreshock.errors import (
    PROBLEM_TYPE_PREFIX,
    RUN_NOT_FOUND,
    ConfigurationError,
    Rejected,
    RunNotFound,
    ServiceUnavailable,
    Unauthorized,
    WrongService,
)

__all__ = [
    "DEFAULT_URL",
    "AsyncServiceConnection",
    "Query",
    "QueryValue",
    "ServiceConnection",
    "configured",
    "wrong_service",
]

DEFAULT_URL = "http://127.0.0.1:8765"

# What httpx raises without an answer; RuntimeError: the connection was closed meanwhile.
_FAILURES = (httpx.HTTPError, httpx.InvalidURL, OSError, RuntimeError)
_TEMPORARY_STATUSES = frozenset({httpx.codes.REQUEST_TIMEOUT, httpx.codes.TOO_EARLY, httpx.codes.TOO_MANY_REQUESTS})
_CONNECT_SECONDS = 5.0

QueryValue = str | int | float | None
Query = Mapping[str, QueryValue] | list[tuple[str, QueryValue]] | None


def configured(url: str | None, api_key: str | None) -> tuple[str, str | None]:
    """Return address and key: those given, else `FORESHOCK_URL` and `FORESHOCK_API_KEY`, else the defaults."""
    address = url or os.environ.get("FORESHOCK_URL") or DEFAULT_URL
    return address, api_key or os.environ.get("FORESHOCK_API_KEY") or None


def wrong_service(url: str) -> WrongService:
    """Return the error for an answer that no Foreshock service gives."""
    return WrongService(f"{url} is not a Foreshock service; check FORESHOCK_URL")


class _Connection:
    """The address of a service, and what requests and answers are to threads and event loops alike."""

    def __init__(self, url: str, api_key: str | None, timeout_seconds: float) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise ConfigurationError(
                f"the service's address must look like {DEFAULT_URL}, got {url!r}; check FORESHOCK_URL"
            )
        self.url = url.rstrip("/")
        headers = {"User-Agent": "foreshock-client"}
        if api_key:
            headers["Authorization"] = f"Bearer {api_key}"
        self._options: dict[str, Any] = {
            "base_url": self.url,
            "headers": headers,
            "timeout": _timeout(timeout_seconds),
            # A key must not follow a redirect to another host.
            "follow_redirects": False,
        }

    def decoded(self, response: httpx.Response) -> Any:
        """Return the JSON of an answer. Raises WrongService if it is not JSON."""
        try:
            return response.json()
        except ValueError as error:
            raise wrong_service(self.url) from error

    def _no_answer(self, error: Exception) -> ServiceUnavailable:
        reason = str(error) or type(error).__name__
        text = f"no answer from {self.url}: {reason}; check that the service runs, and FORESHOCK_URL"
        return ServiceUnavailable(text)

    def _checked(self, response: httpx.Response) -> httpx.Response:
        """Return a 2xx or 304. Raises ServiceError for any other answer."""
        status = response.status_code
        if status < 300 or status == httpx.codes.NOT_MODIFIED:
            return response
        problem = _problem(response)
        fields: dict[str, Any] = {
            "status": status, "problem": problem, "retry_after_seconds": _retry_after_seconds(response)
        }  # fmt: skip
        if status < 400:
            target = response.headers.get("Location", "another address")
            raise WrongService(f"{self.url} redirects to {target}; set FORESHOCK_URL to the final address", **fields)
        detail = problem.get("detail") or problem.get("title") or response.reason_phrase
        message = f"{response.request.method} {response.request.url.path}: {status} {detail}"
        if status in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
            raise Unauthorized(f"{message}; check FORESHOCK_API_KEY", **fields)
        if status >= 500 or status in _TEMPORARY_STATUSES:
            raise ServiceUnavailable(message, **fields)
        if problem.get("type") == PROBLEM_TYPE_PREFIX + RUN_NOT_FOUND:
            raise RunNotFound(message, **fields)
        raise Rejected(message, **fields)


class ServiceConnection(_Connection):
    """HTTP requests to one service, with its API key. Use one connection per thread."""

    def __init__(self, url: str, api_key: str | None = None, *, timeout_seconds: float = 30.0) -> None:
        """Prepare the connection; nothing is sent yet. Raises ConfigurationError if `url` is not an http(s) address."""
        super().__init__(url, api_key, timeout_seconds)
        self._socket: socket.socket | None = None
        self._http = httpx.Client(**self._options)

    def request(
        self,
        method: str,
        path: str,
        *,
        query: Query = None,
        json_body: Any = None,
        content: bytes | Iterable[bytes | memoryview] | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_seconds: float | None = None,
    ) -> httpx.Response:
        """Send a request and return the answer (2xx or 304). Raises ServiceError for any other, and for none."""
        if json_body is not None:
            content = json.dumps(json_body, allow_nan=False).encode()
            headers = {"Content-Type": "application/json", **(headers or {})}
        try:
            response = self._http.request(
                method,
                path,
                params=_parameters(query),
                content=cast("bytes | Iterable[bytes] | None", content),
                headers=headers,
                timeout=_timeout(timeout_seconds),
                extensions={"trace": self._trace},
            )
        except _FAILURES as error:
            raise self._no_answer(error) from error
        return self._checked(response)

    def get_json(self, path: str, query: Query = None) -> Any:
        """Return the decoded JSON of a GET. Raises ServiceError."""
        return self.decoded(self.request("GET", path, query=query))

    def interrupt(self) -> None:
        """Make a request that is waiting in another thread fail at once. Safe from any thread."""
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection."""
        self._http.close()

    def __enter__(self) -> ServiceConnection:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _trace(self, event: str, info: Mapping[str, Any]) -> None:
        # Only the socket itself can wake a thread that waits in a read.
        if event == "connection.connect_tcp.complete":
            self._socket = info["return_value"].get_extra_info("socket")


class AsyncServiceConnection(_Connection):
    """The async twin of ServiceConnection. One connection serves many tasks of one event loop."""

    def __init__(self, url: str, api_key: str | None = None, *, timeout_seconds: float = 30.0) -> None:
        """Prepare the connection; nothing is sent yet. Raises ConfigurationError if `url` is not an http(s) address."""
        super().__init__(url, api_key, timeout_seconds)
        self._http = httpx.AsyncClient(**self._options)

    async def request(
        self,
        method: str,
        path: str,
        *,
        query: Query = None,
        content: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_seconds: float | None = None,
    ) -> httpx.Response:
        """Send a request and return the answer (2xx or 304). Raises ServiceError for any other, and for none."""
        try:
            response = await self._http.request(
                method,
                path,
                params=_parameters(query),
                content=content,
                headers=headers,
                timeout=_timeout(timeout_seconds),
            )
        except _FAILURES as error:
            raise self._no_answer(error) from error
        return self._checked(response)

    async def close(self) -> None:
        """Close the connection."""
        await self._http.aclose()


def _timeout(seconds: float | None) -> Any:
    """Return the timeouts of a request, those of the connection for None; connecting has at most five seconds."""
    if seconds is None:
        return httpx.USE_CLIENT_DEFAULT
    return httpx.Timeout(seconds, connect=min(seconds, _CONNECT_SECONDS))


def _parameters(query: Query) -> Any:
    """Return the query without the parameters that are None."""
    pairs = list(query.items()) if isinstance(query, Mapping) else query or []
    return [(name, value) for name, value in pairs if value is not None]


def _problem(response: httpx.Response) -> dict[str, Any]:
    """Return the problem+json of an error answer; the start of its text as `detail` if it is not JSON."""
    try:
        body = response.json()
    except (ValueError, RecursionError):
        body = None
    return dict(body) if isinstance(body, dict) else {"detail": response.text[:500]}


def _retry_after_seconds(response: httpx.Response) -> float | None:
    """Return the Retry-After header in seconds from now (it may be a number or an HTTP date), None without one."""
    value = response.headers.get("Retry-After", "")
    if value.isdigit():
        return float(value)
    try:
        moment = parsedate_to_datetime(value)
    except ValueError:
        return None
    # A date without a zone ("-0000") is UTC by RFC 5322.
    moment = moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)
    return max(0.0, (moment - datetime.now(UTC)).total_seconds())
