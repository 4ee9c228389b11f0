"""One HTTP connection to the service, shared by the uploader, the advice feed and the commands.

Failures come out in two kinds only: `ServiceError` with a status (the service answered) or without one (it could not
be reached, or its answer was cut off).
"""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Any, NoReturn
from urllib.parse import urlsplit

import httpx

from foreshock.errors import ConfigurationError, ServiceError

__all__ = ["DEFAULT_URL", "ServiceConnection", "problem_of"]

DEFAULT_URL = "http://127.0.0.1:8765"

QueryValue = str | int | float | None
Query = Mapping[str, QueryValue] | list[tuple[str, QueryValue]] | None


class ServiceConnection:
    """Requests to one service, with its key; not safe to share between threads that wait long."""

    def __init__(self, url: str, api_key: str | None = None, *, timeout_seconds: float = 30.0) -> None:
        """Nothing is sent yet. Raises ConfigurationError where `url` is not an http(s) address."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise ConfigurationError(f"the service's address must look like {DEFAULT_URL}, and is {url!r}")
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
        """The answer, whatever its status below 400. Raises ServiceError on any other, and when there is none."""
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
            raise ServiceError(f"the service at {self.url} cannot be reached: {reason}") from error
        if response.status_code >= 300 and response.status_code != httpx.codes.NOT_MODIFIED:
            self._refuse(response)
        return response

    def get_json(self, path: str, query: Query = None) -> Any:
        """The decoded JSON of a GET. Raises ServiceError, also where the answer is not JSON."""
        return self.decoded(self.request("GET", path, query=query))

    def decoded(self, response: httpx.Response) -> Any:
        """The JSON of an answer; raises ServiceError where it is none (another server at that address)."""
        try:
            return response.json()
        except ValueError as error:
            raise ServiceError(f"{self.url} answered, but not as Foreshock does: is the address right?") from error

    def interrupt(self) -> None:
        """Make a request that waits in another thread fail at once."""
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

    def _refuse(self, response: httpx.Response) -> NoReturn:
        problem = problem_of(response)
        detail = problem.get("detail") or problem.get("title") or response.reason_phrase
        where = f"{response.request.method} {response.request.url.path}"
        raise ServiceError(f"{where}: {response.status_code} {detail}", status=response.status_code, problem=problem)


def problem_of(response: httpx.Response) -> dict[str, Any]:
    """The problem+json of an error answer, with a `retry_after` from its header; a short text where it is not JSON."""
    try:
        body = response.json()
    except (ValueError, RecursionError):
        body = None
    problem = dict(body) if isinstance(body, dict) else {"detail": response.text[:500]}
    retry_after = response.headers.get("Retry-After")
    if retry_after is not None and retry_after.isdigit():
        problem["retry_after"] = int(retry_after)
    return problem
