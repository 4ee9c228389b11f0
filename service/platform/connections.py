"""Connections of HTTP clients: headers are bounded and not waited for, and a stop is told at once.

Extends uvicorn's protocol class for httptools, whose parser bounds nothing: not the target, not the headers and not the
trailers, which it holds until they end. Bodies that do not come are `request_bodies.py`'s.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from foreshock_service.platform.problem import (
    PROBLEM_MEDIA_TYPE,
    BadRequest,
    HeadersTooLarge,
    ProblemError,
    RequestTimeout,
)
from foreshock_service.platform.stopping import Stopping

PROTOCOL = "foreshock_service.platform.connections:BoundedProtocol"
"""For uvicorn's `http`."""

# What a header takes in memory beside its bytes, so that a million headers of one byte are not a million bytes.
_BYTES_OF_A_HEADER = 128


class BoundedProtocol(HttpToolsProtocol):
    """Connection of a client. The lifespan's state has `header_seconds`, `max_header_bytes` and `stopping`."""

    _waiting: asyncio.TimerHandle | None = None
    # A part of the next request's headers.
    _received = False
    # Bytes of the target, the headers and the trailers of the newest request.
    _header_bytes = 0
    # Bytes since the parser gave something: of a header that has not ended.
    _unended_bytes = 0
    _gave = False

    def connection_made(self, transport: Any) -> None:
        """Begin to wait for the first request's headers."""
        super().connection_made(transport)
        self._wait_for_headers()

    def data_received(self, data: bytes) -> None:
        """Take bytes; the headers of a request have `header_seconds` from its first byte on."""
        self._gave = False
        super().data_received(data)
        self._unended_bytes = 0 if self._gave else self._unended_bytes + len(data)
        if self._unended_bytes > self._most_header_bytes and not self.transport.is_closing():
            self._refuse(self._too_large())
        self._received = not self._serves()
        if not self._received:
            self._stop_waiting()
        elif self._waiting is None:
            self._wait_for_headers()

    def _should_upgrade(self) -> bool:
        """Serve a request for another protocol, such as WebSocket, as HTTP: there is no other (RFC 9110, section 7.8).

        uvicorn would hand it to a WebSocket library, past the checks of Host, and answer in plain text.
        """
        return False

    def _unsupported_upgrade_warning(self) -> None:
        """Log nothing: anyone could fill the log."""

    def on_message_begin(self) -> None:
        """Begin a request."""
        self._gave, self._header_bytes = True, 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """Take a part of the target."""
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header, or a trailer."""
        self._count(len(name) + len(value) + _BYTES_OF_A_HEADER)
        super().on_header(name, value)

    def on_body(self, body: bytes) -> None:
        """Take a part of the body."""
        self._gave = True
        super().on_body(body)

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP, or has too large headers, with a problem document, and close the connection."""
        if self._header_bytes > self._most_header_bytes:
            self._refuse(self._too_large())
        else:
            self._refuse(BadRequest("the request is not valid HTTP/1.1: check the client, and proxies in between"))

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._stop_waiting()
        super().connection_lost(exc)

    def shutdown(self) -> None:
        """Tell the application that the service stops, then end the connection after its request."""
        stopping: Stopping = self.app_state["stopping"]
        stopping.begin()
        super().shutdown()

    @property
    def _most_header_bytes(self) -> int:
        most: int = self.app_state["max_header_bytes"]
        return most

    def _count(self, size: int) -> None:
        self._gave = True
        self._header_bytes += size
        if self._header_bytes > self._most_header_bytes:
            # Inside the parser, which ends with the error that `send_400_response` answers.
            raise self._too_large()

    def _too_large(self) -> ProblemError:
        return HeadersTooLarge(
            f"the target and headers of the request have more than the {self._most_header_bytes:,} bytes allowed "
            f"({_BYTES_OF_A_HEADER} are added for each header): send fewer or shorter ones, or raise "
            "FORESHOCK_MAX_HEADER_BYTES"
        )

    def _serves(self) -> bool:
        """Return whether a request is being answered."""
        return self.cycle is not None and not self.cycle.response_complete

    def _wait_for_headers(self) -> None:
        self._waiting = asyncio.get_running_loop().call_later(self.app_state["header_seconds"], self._end)

    def _stop_waiting(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None

    def _end(self) -> None:
        self._waiting = None
        if self._serves() or self.transport.is_closing():
            return
        if self._received:
            seconds = self.app_state["header_seconds"]
            self._refuse(RequestTimeout(f"the headers of the request did not come within {seconds:g} s"))
        else:
            self.transport.close()

    def _refuse(self, error: ProblemError) -> None:
        """Answer with a problem, unless another answer has begun, and close the connection."""
        if not (self._serves() and self.cycle.response_started):
            document = error.document()
            body = document.model_dump_json(exclude_none=True).encode()
            self.transport.write(
                b"HTTP/1.1 %d %b\r\nconnection: close\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n%b"
                % (error.status, document.title.encode(), PROBLEM_MEDIA_TYPE.encode(), len(body), body)
            )
        self.transport.close()
