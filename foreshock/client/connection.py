"""The HTTP connection to the service: the one place of address, headers and errors.

Used by the client, the advice feed, the reader, the commands and the workers. Every failure is a
ServiceError: ServiceUnavailable, WrongService, Unauthorized or Rejected (`foreshock/errors.py`).

An answer is bounded in size and time, since it may come from anything that listens at the address. No encoding is
asked for and none is decoded: a megabyte of gzip can be a gigabyte.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, Self, cast
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
from foreshock.page_addresses import run_page_path
from foreshock.parsing import parse_json

DEFAULT_URL = "http://127.0.0.1:8765"

# What httpx raises without an answer; RuntimeError: the connection was closed meanwhile.
_FAILURES = (httpx.HTTPError, httpx.InvalidURL, OSError, RuntimeError)
_TEMPORARY_STATUSES = frozenset({httpx.codes.REQUEST_TIMEOUT, httpx.codes.TOO_EARLY, httpx.codes.TOO_MANY_REQUESTS})
_NO_SUCH_PATH = frozenset({httpx.codes.NOT_FOUND, httpx.codes.METHOD_NOT_ALLOWED})
_PATHS_OF_EVERY_SERVICE = ("/v1/runs", "/livez")
"""If one is missing, the address is another program's, or has a path too many, such as http://host:8765/v1."""
_CONNECT_SECONDS = 5.0
# The lowest average speed at which the body of a request may be sent.
_LEAST_BYTES_PER_SECOND = 65_536
LONGEST_ANSWER_BYTES = 1 << 30
"""The limit for readers and workers: tables of rollouts are the largest answers."""
TRAINER_ANSWER_BYTES = 1 << 18
"""The limit in a trainer: receipts, advice and problems. JSON of empty lists takes 25 times its bytes in memory."""
_MOST_REASON = 1000

QueryValue = str | int | float | None
Query = Mapping[str, QueryValue] | list[tuple[str, QueryValue]] | None


def configured(url: str | None, api_key: str | None) -> tuple[str, str | None]:
    """Return address and key: those given, of the environment, or the defaults. Raises ConfigurationError."""
    address = url or os.environ.get("FORESHOCK_URL") or DEFAULT_URL
    return address.strip(), usable_key(api_key or os.environ.get("FORESHOCK_API_KEY"))


def usable_key(api_key: str | None, variable: str = "FORESHOCK_API_KEY") -> str | None:
    """Return the key without the white space around it; None if nothing is left.

    Raises ConfigurationError, without the key, for other characters than printable ASCII: httpx's error would show it.
    """
    key = (api_key or "").strip()
    wrong = [place for place, character in enumerate(key, 1) if not " " <= character <= "~"]
    if wrong:
        raise ConfigurationError(
            f"an API key must be printable ASCII, got another character at place {wrong[0]} of {len(key)}; check "
            f"{variable}"
        )
    return key or None


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        httpx.URL(url.strip())
    except (ValueError, httpx.InvalidURL):
        return False
    return parts.scheme in ("http", "https") and bool(parts.netloc)


def shown_address(url: str) -> str:
    """Return an address without user and password; of one that is not valid, the text after the last @."""
    scheme, mark, rest = url.strip().partition("://")
    if not _is_address(url):
        return url.strip().rpartition("@")[2]
    host, slash, path = rest.partition("/")
    return scheme + mark + host.rpartition("@")[2] + slash + path


def run_url(service: str, project: str, key: str) -> str:
    """Return the address of a run's page on the service at an address, which may have a user and password."""
    return shown_address(service).rstrip("/") + run_page_path(project, key)


def wrong_service(url: str) -> WrongService:
    """Return the error for an answer that no Foreshock service gives."""
    return WrongService(f"{url} is not a Foreshock service; check FORESHOCK_URL")


class ServiceConnection:
    """HTTP requests to one service, with its API key. Use one connection per thread."""

    def __init__(
        self,
        url: str,
        api_key: str | None = None,
        *,
        timeout_seconds: float = 30.0,
        max_answer_bytes: int = LONGEST_ANSWER_BYTES,
    ) -> None:
        """Prepare the connection; nothing is sent yet. Raises ConfigurationError for an unusable address or key."""
        if not _is_address(url):
            raise ConfigurationError(
                f"the service's address must look like {DEFAULT_URL}, got {shown_address(url)!r}; check FORESHOCK_URL"
            )
        self.url = shown_address(url).rstrip("/")
        self._timeout_seconds = timeout_seconds
        self._max_answer_bytes = max_answer_bytes
        headers = {"User-Agent": "foreshock-client", "Accept-Encoding": "identity"}
        named = httpx.URL(url.strip())
        if key := usable_key(api_key):
            if named.userinfo:
                raise ConfigurationError(
                    f"the address of {self.url} has a user and password, and there is an API key: a request can carry "
                    "one of them only, in its Authorization header; remove one, see FORESHOCK_URL and FORESHOCK_API_KEY"
                )
            headers["Authorization"] = f"Bearer {key}"
        self._socket: socket.socket | None = None
        self._deadline = math.inf
        self.is_interrupted = False
        self._http = httpx.Client(
            # Without the password, which httpx logs.
            base_url=self.url,
            auth=(named.username, named.password) if named.userinfo else None,
            headers=headers,
            # A key must not follow a redirect to another host.
            follow_redirects=False,
        )

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
        """Send a request and return the answer (2xx or 304). Raises ServiceError for any other, and for none.

        The timeout applies to each pause, and to the whole request except the time that its body takes.
        """
        if json_body is not None:
            content = json.dumps(json_body, allow_nan=False).encode()
            headers = {"Content-Type": "application/json", **(headers or {})}
        seconds = self._timeout_seconds if timeout_seconds is None else timeout_seconds
        size = len(content) if isinstance(content, bytes) else int((headers or {}).get("Content-Length", 0))
        most_seconds = seconds + size / _LEAST_BYTES_PER_SECOND
        self._deadline = time.monotonic() + most_seconds
        pairs = list(query.items()) if isinstance(query, Mapping) else query or []
        try:
            with self._http.stream(
                method,
                path,
                params=[(name, value) for name, value in pairs if value is not None],
                content=cast("bytes | Iterable[bytes] | None", content),
                headers=headers,
                timeout=httpx.Timeout(seconds, connect=min(seconds, _CONNECT_SECONDS)),
                extensions={"trace": self._trace},
            ) as response:
                self._check_size(response, 0)
                body = bytearray()
                for piece in response.iter_raw():
                    body += piece
                    self._check_size(response, len(body))
        except _FAILURES as error:
            reason = str(error) or type(error).__name__
            if time.monotonic() >= self._deadline:
                reason = f"no whole answer in {most_seconds:.0f} s"
            elif self.is_interrupted:
                reason = "the client was closed while it waited"
            raise ServiceUnavailable(
                f"no answer from {self.url}: {reason}; check that the service runs, and FORESHOCK_URL"
            ) from error
        # An answer that was read in pieces has no body of its own.
        whole = httpx.Response(
            response.status_code, headers=response.headers, content=bytes(body), request=response.request,
            extensions=response.extensions,
        )  # fmt: skip
        return self._checked(whole)

    def decoded(self, response: httpx.Response) -> Any:
        """Return the JSON of an answer. Raises WrongService if it is not JSON."""
        try:
            return parse_json(response.content)
        except ValueError as error:
            raise wrong_service(self.url) from error

    def get_json(self, path: str, query: Query = None) -> Any:
        """Return the decoded JSON of a GET. Raises ServiceError."""
        return self.decoded(self.request("GET", path, query=query))

    def interrupt(self) -> None:
        """Make the request of another thread, and later ones, fail at once. Safe from any thread."""
        self.is_interrupted = True
        if self._socket is not None:
            with contextlib.suppress(OSError):
                # Of the plain socket: that of TLS would drop its keys, which the other thread uses.
                socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def _trace(self, event: str, info: Mapping[str, Any]) -> None:
        """Take the stream of a new connection, that of TCP and then that of TLS over it, which has another socket."""
        if event.endswith(("connect_tcp.complete", "start_tls.complete")):
            stream = info["return_value"]
            # Only the socket itself can wake a thread that waits in a read.
            self._socket = stream.get_extra_info("socket")
            stream.read, stream.write = self._in_time(stream.read), self._in_time(stream.write)
            if self.is_interrupted:
                self.interrupt()

    def _in_time(self, transfer: Callable[..., Any]) -> Callable[..., Any]:
        """Return a read or write that ends at the deadline of the request: httpx limits each pause only."""

        def transfer_in_time(data: Any, timeout: float | None = None) -> Any:
            left = self._deadline - time.monotonic()
            if left <= 0.0:
                raise TimeoutError
            return transfer(data, left if timeout is None else min(left, timeout))

        return transfer_in_time

    def _check_size(self, response: httpx.Response, size: int) -> None:
        """Raise WrongService if `size` bytes of the answer are too many, or if they are in an encoding."""
        if size > self._max_answer_bytes:
            raise WrongService(
                f"{self.url} answers with more than {self._max_answer_bytes:,} bytes; check FORESHOCK_URL"
            )
        if response.headers.get("Content-Encoding", "identity") != "identity":
            raise WrongService(f"{self.url} answers in an encoding that was not asked for; check FORESHOCK_URL")

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
            raise WrongService(
                f"{self.url} redirects to {shown_address(target)}; set FORESHOCK_URL to the final address", **fields
            )
        detail = problem.get("detail") or problem.get("title") or response.reason_phrase
        # One line of a log, whatever the answer holds.
        detail = "".join(each if each.isprintable() else " " for each in str(detail)[:_MOST_REASON])
        message = f"{response.request.method} {response.request.url.path}: {status} {detail}"
        if status in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
            raise Unauthorized(f"{message}; check FORESHOCK_API_KEY", **fields)
        if status in _NO_SUCH_PATH and response.request.url.path.endswith(_PATHS_OF_EVERY_SERVICE):
            raise wrong_service(self.url)
        if status >= 500 or status in _TEMPORARY_STATUSES:
            raise ServiceUnavailable(message, **fields)
        if problem.get("type") == PROBLEM_TYPE_PREFIX + RUN_NOT_FOUND:
            raise RunNotFound(message, **fields)
        raise Rejected(message, **fields)


def _problem(response: httpx.Response) -> dict[str, Any]:
    """Return the problem+json of an error answer; the start of its text as `detail` if it is not JSON."""
    try:
        body = parse_json(response.content)
    except ValueError:
        body = None
    return dict(body) if isinstance(body, dict) else {"detail": response.text[:500]}


def _retry_after_seconds(response: httpx.Response) -> float | None:
    """Return the Retry-After header in seconds from now (it may be a number or an HTTP date), None without one."""
    value = response.headers.get("Retry-After", "")
    if value.isdecimal():
        # Twelve digits are longer than any useful delay.
        return float(value[:12])
    try:
        moment = parsedate_to_datetime(value)
    except (ValueError, TypeError, IndexError, OverflowError):
        return None
    # A date without a zone ("-0000") is UTC by RFC 5322.
    moment = moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)
    return max(0.0, (moment - datetime.now(UTC)).total_seconds())
