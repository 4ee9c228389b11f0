"""HTTP/1.1 on one connection: uvicorn's httptools protocol with bounds on everything that is not a body.

httptools parses in C, and bounds nothing. h11 bounds headers, but parses in Python: a body in chunks of one byte kept
the event loop busy for two seconds a megabyte.
"""

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

# Parsed at a time: a bound is checked, and the connection may be closed, between two pieces.
_PIECE_BYTES = 16 * 1024
_MOST_HEADERS = 200
# Framing of chunks, for each byte that headers may have: 100,000 chunks of a byte by default.
_FRAMING = 8
# Chunks of 100 bytes and more have no framing that counts.
_BODY_BYTES_PER_FRAMING_BYTE = 16


class BoundedProtocol(HttpToolsProtocol):
    """Refuses headers beyond `max_header_bytes`, more than 200 of them, and bodies that are mostly framing."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._most = int(self.config.h11_max_incomplete_event_size or 65_536)
        self._limit = self._most
        # Bytes of heads, trailers and framing since the last request that was answered.
        self._counted = 0.0
        self._piece = 0

    def data_received(self, data: bytes) -> None:
        """Parse what came, a piece at a time."""
        for start in range(0, len(data), _PIECE_BYTES):
            if self.transport.is_closing():
                return
            piece = data[start : start + _PIECE_BYTES]
            self._piece = len(piece)
            self._counted += self._piece
            super().data_received(piece)
            if self._counted > self._limit:
                self._refuse()

    def on_message_begin(self) -> None:
        """Begin to count anew, unless the request came before the one in front of it was answered."""
        if self.cycle is None or self.cycle.response_complete:
            self._counted = float(self._piece)
            self._limit = self._most
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header. Raises ValueError beyond the bound, which is answered as what is no HTTP is."""
        if len(self.headers) >= _MOST_HEADERS:
            raise ValueError(f"more than {_MOST_HEADERS} headers")
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Go on to the body."""
        super().on_headers_complete()
        self._limit = self._most * _FRAMING

    def on_body(self, body: bytes) -> None:
        """Take a part of a body, which does not count."""
        self._counted = max(0.0, self._counted - len(body) * (1 + 1 / _BODY_BYTES_PER_FRAMING_BYTE))
        super().on_body(body)

    def _refuse(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.cycle is None or not self.cycle.response_started:
            self.send_400_response("Invalid HTTP request received.")
        elif isinstance(self.transport, asyncio.Transport):
            self.transport.close()
