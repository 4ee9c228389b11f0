"""Compressed request bodies: `Content-Encoding: gzip` or `zstd`, decompressed piece by piece under a cap."""

from __future__ import annotations

import asyncio
import sys
import zlib
from collections.abc import Callable
from typing import Protocol

from starlette.types import Message, Receive

from foreshock_service.platform.body_limits import too_large
from foreshock_service.platform.problem import BodyRefused, ProblemError, UnsupportedMediaType

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

# What one call of a decompressor may return: the memory of a body that is larger decompressed does not grow with it.
_PIECE_BYTES = 256 * 1024
_GZIP = 16 + zlib.MAX_WBITS
# 8 MiB, what RFC 9659 asks decoders of HTTP to accept: a frame names its window, up to 2 GiB, and it is allocated.
_WINDOW_LOG = 23


class InvalidBodyEncoding(ProblemError):
    """A body that is not in the encoding of its Content-Encoding, or ends too early."""

    status = 400
    problem_type = "invalid-body-encoding"


class _Decompressor(Protocol):
    """A stream of one member (gzip) or frame (zstd)."""

    @property
    def eof(self) -> bool:
        """Return True at the end of the member."""
        ...

    @property
    def unused_data(self) -> bytes:
        """Return what came after the end of the member."""
        ...

    def take(self, data: bytes) -> bytes:
        """Return at most one piece of output, of `data` and of what earlier calls left; b"" if it needs more input."""
        ...


class _Gzip:
    def __init__(self) -> None:
        self._stream = zlib.decompressobj(_GZIP)

    @property
    def eof(self) -> bool:
        return self._stream.eof

    @property
    def unused_data(self) -> bytes:
        return self._stream.unused_data

    def take(self, data: bytes) -> bytes:
        return self._stream.decompress(self._stream.unconsumed_tail + data, _PIECE_BYTES)


class _Zstd:
    def __init__(self) -> None:
        self._stream = zstd.ZstdDecompressor(options={zstd.DecompressionParameter.window_log_max: _WINDOW_LOG})

    @property
    def eof(self) -> bool:
        return self._stream.eof

    @property
    def unused_data(self) -> bytes:
        return self._stream.unused_data

    def take(self, data: bytes) -> bytes:
        return self._stream.decompress(data, _PIECE_BYTES)


_DECOMPRESSORS: dict[str, Callable[[], _Decompressor]] = {"gzip": _Gzip, "x-gzip": _Gzip, "zstd": _Zstd}


def body_encoding(content_encoding: str | None) -> str | None:
    """Return `gzip` or `zstd`, None for a body as it is. Raises UnsupportedMediaType (415) for any other encoding."""
    name = (content_encoding or "identity").strip().lower()
    if name == "identity":
        return None
    if name not in _DECOMPRESSORS:
        raise UnsupportedMediaType(
            f"a body may have Content-Encoding gzip, zstd or none, got {name[:100]!r}",
            headers={"Accept-Encoding": "gzip, zstd"},
        )
    return name


class DecompressedBody:
    """The decompressed body of a request while it is received; `received` is its bytes so far."""

    def __init__(self, receive: Receive, encoding: str, limit: int) -> None:
        self._receive = receive
        self._encoding = encoding
        self._limit = limit
        self._new = _DECOMPRESSORS[encoding]
        self._stream = self._new()
        self._pending = b""
        self._has_begun = False
        self._is_last = False
        self.received = 0

    async def receive(self) -> Message:
        """Receive as ASGI does, at most a piece at a time.

        Raises BodyRefused: 413 once the body has more than `limit` bytes, 400 if it is not in its encoding.
        """
        while True:
            try:
                piece = self._take()
            except (zlib.error, zstd.ZstdError) as error:
                raise BodyRefused(
                    InvalidBodyEncoding(f"the body is not {self._encoding}, as its Content-Encoding says: {error}")
                ) from error
            if piece:
                self.received += len(piece)
                if self.received > self._limit:
                    raise too_large(self._limit, "decompressed")
                # The event loop serves others between the pieces of a body that came in one message.
                await asyncio.sleep(0)
                return {"type": "http.request", "body": piece, "more_body": True}
            if self._is_last:
                if self._has_begun and not self._stream.eof:
                    raise BodyRefused(InvalidBodyEncoding(f"the {self._encoding} body ends too early: send it again"))
                return {"type": "http.request", "body": b"", "more_body": False}
            message = await self._receive()
            if message["type"] != "http.request":
                return message
            self._pending = message.get("body", b"")
            self._is_last = not message.get("more_body", False)

    def _take(self) -> bytes:
        """Return the next piece; b"" if there is none without more input."""
        while True:
            if self._stream.eof:
                self._pending = self._stream.unused_data + self._pending
                if not self._pending:
                    return b""
                # Members and frames may follow each other.
                self._stream = self._new()
            data, self._pending = self._pending, b""
            self._has_begun = self._has_begun or bool(data)
            piece = self._stream.take(data)
            if piece or not self._stream.eof:
                return piece
