"""Connections of HTTP clients: headers that do not come are not waited for, and a stop is told at once.

A mixin of uvicorn's protocol class, whichever parser is installed. Bodies that do not come are `body_limits.py`'s.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

from service.platform.problem import PROBLEM_MEDIA_TYPE, RequestTimeout
from service.platform.stopping import Stopping

PROTOCOL = "service.platform.connections:TimedProtocol"
"""For uvicorn's `http`."""


class TimedProtocol(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
    """Connection of a client. The lifespan's state has `header_seconds` and `stopping`."""

    _waiting: asyncio.TimerHandle | None = None
    # A part of the next request's headers.
    _received = False

    def connection_made(self, transport: Any) -> None:
        """Begin to wait for the first request's headers."""
        super().connection_made(transport)
        self._wait_for_headers()

    def data_received(self, data: bytes) -> None:
        """Take bytes; the headers of a request have `header_seconds` from its first byte on."""
        super().data_received(data)
        self._received = not self._serves()
        if not self._received:
            self._stop_waiting()
        elif self._waiting is None:
            self._wait_for_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._stop_waiting()
        super().connection_lost(exc)

    def shutdown(self) -> None:
        """Tell the application that the service stops, then end the connection after its request."""
        stopping: Stopping = self.app_state["stopping"]
        stopping.begin()
        super().shutdown()

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
            error = RequestTimeout(
                f"the headers of the request did not come within {self.app_state['header_seconds']:g} s"
            )
            body = error.document().model_dump_json(exclude_none=True).encode()
            self.transport.write(
                b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n%b"
                % (PROBLEM_MEDIA_TYPE.encode(), len(body), body)
            )
        self.transport.close()
