"""One HTTP connection to the service, used by the uploader, the advice feed, the commands and the workers.

Every failure is a ServiceError: ServiceUnavailable, WrongService, Unauthorized or Rejected (`foreshock/errors.py`).
"""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

import httpx

from foreshock.errors import (
    ConfigurationError,
    Rejected,
    ServiceError,
    ServiceUnavailable,
    Unauthorized,
    WrongService,
)

__all__ = ["DEFAULT_URL", "ServiceConnection", "problem_of"]

DEFAULT_URL = "http://127.0.0.1:8765"

_TEMPORARY_STATUSES = frozenset({httpx.codes.REQUEST_TIMEOUT, httpx.codes.TOO_EARLY, httpx.codes.TOO_MANY_REQUESTS})

QueryValue = str | int | float | None
Query = Mapping[str, QueryValue] | list[tuple[str, QueryValue]] | None


class ServiceConnection:
    """HTTP requests to one service, with its API key. Use one connection per thread."""

    def __init__(self, url: str, api_key: str | None = None, *, timeout_seconds: float = 30.0) -> None:
        """Prepare the connection; nothing is sent yet. Raises ConfigurationError if `url` is not an http(s) address."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise ConfigurationError(
                f"the service's address must look like {DEFAULT_URL}, got {url!r}; check FORESHOCK_URL"
            )
        self.url = url.rstrip("/")
        headers = {"User-Agent": "foreshock-client"}
        if api_key:
            headers["Authorization"] = f"Bearer {api_key}"
        self._socket: socket.socket | None = None
        self._http = httpx.Client(
            base_url=self.url,
            headers=headers,
            timeout=httpx.Timeout(timeout_seconds, connect=min(timeout_seconds, 5.0)),
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
        content: bytes | Iterable[bytes] | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_seconds: float | None = None,
    ) -> httpx.Response:
        """Send a request and return the answer (2xx or 304). Raises ServiceError for any other, and for none."""
        if isinstance(query, Mapping):
            query = list(query.items())
        parameters: Any = [(name, value) for name, value in query or () if value is not None]
        options: dict[str, Any] = {"extensions": {"trace": self._trace}}
        if timeout_seconds is not None:
            options["timeout"] = httpx.Timeout(timeout_seconds, connect=min(timeout_seconds, 5.0))
        if json_body is not None:
            content = json.dumps(json_body, allow_nan=False).encode()
            headers = {"Content-Type": "application/json", **(headers or {})}
        try:
            response = self._http.request(method, path, params=parameters, content=content, headers=headers, **options)
        except (httpx.HTTPError, httpx.InvalidURL, OSError, RuntimeError) as error:
            reason = str(error) or type(error).__name__
            raise ServiceUnavailable(
                f"no answer from {self.url}: {reason}; check that the service runs, and FORESHOCK_URL"
            ) from error
        if response.status_code >= 300 and response.status_code != httpx.codes.NOT_MODIFIED:
            raise self._error_of(response)
        return response

    def get_json(self, path: str, query: Query = None) -> Any:
        """Return the decoded JSON of a GET. Raises ServiceError."""
        return self.decoded(self.request("GET", path, query=query))

    def decoded(self, response: httpx.Response) -> Any:
        """Return the JSON of an answer. Raises WrongService if it is not JSON."""
        try:
            return response.json()
        except ValueError as error:
            raise self.wrong_service() from error

    def wrong_service(self) -> WrongService:
        """Return the error for an answer that no Foreshock service gives."""
        return WrongService(f"{self.url} is not a Foreshock service; check FORESHOCK_URL")

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

    def _error_of(self, response: httpx.Response) -> ServiceError:
        status, problem = response.status_code, problem_of(response)
        detail = problem.get("detail") or problem.get("title") or response.reason_phrase
        message = f"{response.request.method} {response.request.url.path}: {status} {detail}"
        fields: dict[str, Any] = {
            "status": status, "problem": problem, "retry_after_seconds": _retry_after_seconds(response)
        }  # fmt: skip
        if status < 400:
            target = response.headers.get("Location", "another address")
            return WrongService(f"{self.url} redirects to {target}; set FORESHOCK_URL to the final address", **fields)
        if status in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
            return Unauthorized(f"{message}; check FORESHOCK_API_KEY", **fields)
        if status >= 500 or status in _TEMPORARY_STATUSES:
            return ServiceUnavailable(message, **fields)
        return Rejected(message, **fields)


def problem_of(response: httpx.Response) -> dict[str, Any]:
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
