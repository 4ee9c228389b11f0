"""One HTTP connection to the service, used by the uploader, the advice feed, the commands and the workers.

Every failure is a ServiceError: ServiceUnavailable, WrongService, Unauthorized or Rejected (`foreshock/errors.py`).
"""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Any

import httpx

from foreshock.client import exchange
from foreshock.client.exchange import Query
from foreshock.errors import WrongService

__all__ = ["ServiceConnection"]


class ServiceConnection:
    """HTTP requests to one service, with its API key. Use one connection per thread."""

    def __init__(self, url: str, api_key: str | None = None, *, timeout_seconds: float = 30.0) -> None:
        """Prepare the connection; nothing is sent yet. Raises ConfigurationError if `url` is not an http(s) address."""
        self.url = exchange.checked_url(url)
        self._socket: socket.socket | None = None
        self._http = httpx.Client(
            base_url=self.url,
            headers=exchange.default_headers(api_key),
            timeout=exchange.timeout_of(timeout_seconds),
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
        options: dict[str, Any] = {"extensions": {"trace": self._trace}}
        if timeout_seconds is not None:
            options["timeout"] = exchange.timeout_of(timeout_seconds)
        if json_body is not None:
            content = json.dumps(json_body, allow_nan=False).encode()
            headers = {"Content-Type": "application/json", **(headers or {})}
        parameters = exchange.parameters_of(query)
        try:
            response = self._http.request(method, path, params=parameters, content=content, headers=headers, **options)
        except exchange.FAILURES as error:
            raise exchange.no_answer(self.url, error) from error
        refusal = exchange.error_of(self.url, response)
        if refusal is not None:
            raise refusal
        return response

    def get_json(self, path: str, query: Query = None) -> Any:
        """Return the decoded JSON of a GET. Raises ServiceError."""
        return self.decoded(self.request("GET", path, query=query))

    def decoded(self, response: httpx.Response) -> Any:
        """Return the JSON of an answer. Raises WrongService if it is not JSON."""
        return exchange.decoded(self.url, response)

    def wrong_service(self) -> WrongService:
        """Return the error for an answer that no Foreshock service gives."""
        return exchange.wrong_service(self.url)

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
