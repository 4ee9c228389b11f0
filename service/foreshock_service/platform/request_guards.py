"""ASGI middleware: check the Host, Origin, key and body of every request, and answer unexpected errors.

The key is checked before the body is read. A body is counted as it is received and never stored here.
`Content-Encoding: gzip` and `zstd` are decompressed piece by piece in a thread, under caps on the bytes and on the
members or frames. A body that stops coming, or trickles, is refused with 408 and its connection closed.
"""

import asyncio
import contextlib
import logging
import time
import zlib
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from foreshock import errors, statistics_shards
from foreshock_service.platform import compression, keys, parameters, problem
from foreshock_service.platform.settings import Settings

PARQUET_MEDIA_TYPE = "application/vnd.apache.parquet"
_TABLES = (PARQUET_MEDIA_TYPE, statistics_shards.MEDIA_TYPE)
# The longest time that a refused client may go on writing.
_LINGER_SECONDS = 2.0
API = "/v1/"
# Limit of a page's form, which has a key, a token or a few numbers.
_FORM_BYTES = 64 * 1024


def media_type_of(request: Request) -> str:
    """Return the media type of the request's Content-Type, without its parameters; "" if it declares none."""
    return request.headers.get("content-type", "").partition(";")[0].strip()


def body_limit(request: Request, settings: Settings) -> int:
    """Return the largest size in bytes that the request's body may have.

    Raises LimitExceeded if Content-Length is above the limit.
    """
    is_table = media_type_of(request) in _TABLES
    limit = settings.max_body_bytes if is_table else settings.max_json_bytes
    if not request.url.path.startswith(API):
        limit = min(limit, _FORM_BYTES)
    declared = request.headers.get("content-length", "0")
    if declared.isdecimal() and int(declared) > limit:
        raise problem.LimitExceeded(
            f"the body has {int(declared):,} bytes, more than the {limit:,} allowed: send more, smaller shards"
        )
    return limit


async def refuse_unread(
    error: problem.ProblemError, scope: Scope, receive: Receive, send: Send, most_bytes: int
) -> None:
    """Answer before the body is read, then close the connection.

    If the connection were closed at once, a client that still writes would see a reset instead of the answer. So the
    headers and the whole text are sent first. Then up to `most_bytes` of the body are read and discarded, for at most
    `_LINGER_SECONDS`, before the answer ends.
    """

    async def send_lingering(message: Message) -> None:
        if message["type"] != "http.response.body":
            await send(message)
            return
        await send({**message, "more_body": True})
        left, more = most_bytes, True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LINGER_SECONDS):
                while left > 0 and more:
                    received = await receive()
                    left -= len(received.get("body", b""))
                    more = received["type"] == "http.request" and received.get("more_body", False)
        await send({"type": "http.response.body"})

    error.headers = {**error.headers, "Connection": "close"}
    await problem.problem_response(error)(scope, receive, send_lingering)


def too_large(limit: int, how: str = "") -> problem.BodyRefused:
    """Return the error for a body of more than `limit` bytes; `how` says how they were counted."""
    more = f"more than the {limit:,} bytes allowed{f', {how}' if how else ''}"
    return problem.BodyRefused(problem.LimitExceeded(f"the body has {more}: send more, smaller shards"))


class ReceivedBody:
    """The body of a request while it is received; `received` is the number of its bytes so far.

    Its size and its pauses are bounded; so is its average speed, once it has taken as long as the longest pause.
    """

    def __init__(self, receive: Receive, limit: int, settings: Settings) -> None:
        self._receive = receive
        self._limit = limit
        self._seconds, self._least = settings.body_stall_seconds, settings.body_least_bytes_per_second
        self._begin = time.monotonic()
        self._is_complete = False
        self.received = 0

    async def receive(self) -> Message:
        """Receive an ASGI message. Raises BodyRefused: 413 beyond the size, 408 for a body that stalls or trickles."""
        if self._is_complete:
            # The next message is the end of the connection.
            return await self._receive()
        try:
            async with asyncio.timeout(self._seconds):
                message = await self._receive()
        except TimeoutError:
            raise _stalled(
                f"no byte of the body came for {self._seconds:g} s (FORESHOCK_BODY_STALL_SECONDS): send it again"
            ) from None
        self.received += len(message.get("body", b""))
        if self.received > self._limit:
            raise too_large(self._limit)
        self._is_complete = message["type"] != "http.request" or not message.get("more_body", False)
        seconds = time.monotonic() - self._begin
        if not self._is_complete and seconds > self._seconds and self.received < seconds * self._least:
            raise _stalled(
                f"{self.received:,} bytes of the body came in {seconds:.0f} s, fewer than {self._least:,} a second "
                "(FORESHOCK_BODY_LEAST_BYTES_PER_SECOND): send it again"
            )
        return message


def _stalled(detail: str) -> problem.BodyRefused:
    return problem.BodyRefused(problem.RequestTimeout(detail, headers={"Connection": "close"}))


# Most bytes that one call of a decompressor returns, so that memory does not grow with the decompressed size.
_PIECE_BYTES = 256 * 1024
_GZIP = 16 + zlib.MAX_WBITS
# 8 MiB, which RFC 9659 requires HTTP decoders to accept. A frame may ask for a window of 2 GiB, which is allocated.
_WINDOW_LOG = 23


# Most bodies have one member. A parallel compressor writes one for each block of about 1 MiB.
MOST_MEMBERS = 1000


class InvalidBodyEncoding(problem.ProblemError, status=400, problem_type="invalid-body-encoding"):
    """A body that is not in the encoding of its Content-Encoding, or ends too early."""


def _new_stream(encoding: str) -> Any:
    """Return a decompressor of one member (gzip) or frame (zstd)."""
    if encoding == "zstd":
        return compression.zstd.ZstdDecompressor(
            options={compression.zstd.DecompressionParameter.window_log_max: _WINDOW_LOG}
        )
    return zlib.decompressobj(_GZIP)


def body_encoding(content_encoding: str | None) -> str | None:
    """Return `gzip`, `x-gzip` or `zstd`; None for a plain body. Raises UnsupportedMediaType (415) for others."""
    name = (content_encoding or "identity").strip().lower()
    if name == "identity":
        return None
    if name not in ("gzip", "x-gzip", "zstd"):
        raise problem.UnsupportedMediaType(
            f"a body may have Content-Encoding gzip, zstd or none, got {name[:100]!r}",
            headers={"Accept-Encoding": "gzip, zstd"},
        )
    return name


class DecompressedBody:
    """The decompressed body of a request while it is received; `received` is the number of its bytes so far."""

    def __init__(self, receive: Receive, encoding: str, limit: int) -> None:
        self._receive = receive
        self._encoding = encoding
        self._limit = limit
        self._stream = _new_stream(encoding)
        self._pending = b""
        self._members = 1
        self._has_begun = False
        self._is_last = False
        self.received = 0

    async def receive(self) -> Message:
        """Receive an ASGI message with at most one piece of the body.

        Raises BodyRefused: 413 once the body has more than `limit` bytes or 1000 members, 400 if it is not in its
        encoding.
        """
        while True:
            try:
                # Decompression releases the GIL, so the event loop serves other requests meanwhile.
                piece = await run_in_threadpool(self._take) if self._pending or self._has_begun else b""
            except (zlib.error, compression.zstd.ZstdError) as error:
                raise problem.BodyRefused(
                    InvalidBodyEncoding(f"the body is not {self._encoding}, as its Content-Encoding says: {error}")
                ) from error
            if piece:
                self.received += len(piece)
                if self.received > self._limit:
                    raise too_large(self._limit, "decompressed")
                return {"type": "http.request", "body": piece, "more_body": True}
            if self._is_last:
                if self._has_begun and not self._stream.eof:
                    raise problem.BodyRefused(
                        InvalidBodyEncoding(f"the {self._encoding} body ends too early: send it again")
                    )
                return {"type": "http.request", "body": b"", "more_body": False}
            message = await self._receive()
            if message["type"] != "http.request":
                return message
            self._pending = message.get("body", b"")
            self._is_last = not message.get("more_body", False)

    def _take(self) -> bytes:
        """Return the next piece; b"" if there is none without more input."""
        piece: bytes
        while True:
            if self._stream.eof:
                self._pending = self._stream.unused_data + self._pending
                if not self._pending:
                    return b""
                # A body may have several members or frames.
                self._members += 1
                if self._members > MOST_MEMBERS:
                    name = "frames" if self._encoding == "zstd" else "members"
                    raise problem.BodyRefused(
                        problem.LimitExceeded(f"the body has more than {MOST_MEMBERS:,} {name}: send one")
                    )
                self._stream = _new_stream(self._encoding)
            data, self._pending = self._pending, b""
            self._has_begun = self._has_begun or bool(data)
            # zlib hands back the input that it did not use; zstd keeps it.
            piece = self._stream.decompress(getattr(self._stream, "unconsumed_tail", b"") + data, _PIECE_BYTES)
            if piece or not self._stream.eof:
                return piece


_logger = logging.getLogger(__name__)


SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})


class CrossSiteRefused(problem.ProblemError, status=403, problem_type="cross-site-refused"):
    """A browser request that did not come from the service's own pages."""


class HostNotAllowed(problem.ProblemError, status=400, problem_type=errors.HOST_NOT_ALLOWED):
    """A Host header that is not in the allow-list; the check prevents DNS rebinding."""


class RequestGuard:
    """Middleware that checks Host, Origin, the key, and the size of the body: as declared, and while it is received.

    For a request of the API, `authenticate` is called in a thread before the body is read. It raises a problem, or
    stores the principal in the request's state for the route. The bytes of the body are charged to the key.
    """

    def __init__(
        self, app: ASGIApp, settings: Settings, limits: keys.KeyLimits, authenticate: Callable[[Request], object]
    ) -> None:
        self._app = app
        self._settings = settings
        self._limits = limits
        self._hosts = settings.host_allow_list
        self._authenticate = authenticate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve the request, or answer with a problem document."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope = parameters.keep_encoded_slashes(scope)
        request = Request(scope)
        try:
            self._check_origin(request)
            limit = body_limit(request, self._settings)
            encoding = body_encoding(request.headers.get("content-encoding"))
            if request.method not in SAFE_METHODS and request.url.path.startswith(API):
                await run_in_threadpool(self._authenticate, request)
        except (problem.ProblemError, *problem.DATABASE_ERRORS) as error:
            found = error if isinstance(error, problem.ProblemError) else problem.database_problem(error)
            if found is not error:
                _logger.error("%s %s: %s", request.method, request.url.path, getattr(error, "orig", error))
            await refuse_unread(found, scope, receive, send, self._settings.max_json_bytes)
            return
        if request.method == "HEAD":
            # Every route that answers GET also answers HEAD (RFC 9110); the server leaves the body out.
            request = Request({**scope, "method": "GET"})
        body, state = ReceivedBody(receive, limit, self._settings), request.state
        content = body if encoding is None else DecompressedBody(body.receive, encoding, limit)
        try:
            await self._serve(request, content.receive, send)
        finally:
            # Set by `authenticate`.
            key_id = getattr(state, "key_id", None)
            if key_id is not None:
                self._limits.charge(key_id, max(body.received, content.received))

    async def _serve(self, request: Request, receive: Receive, send: Send) -> None:
        """Serve the request; answer an unexpected error with a problem, since the server would close the connection."""
        started = False

        async def send_noting(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(request.scope, receive, send_noting)
        except Exception as error:
            if started:
                raise
            if isinstance(error, problem.BodyRefused):
                # Nothing reads a body afterwards.
                found = error.problem
            else:
                _logger.exception("unexpected error in %s %s", request.method, request.url.path)
                found = problem.InternalError("the service failed: see its log")
            await problem.problem_response(found)(request.scope, receive, send)

    def _check_origin(self, request: Request) -> None:
        # Not Starlette's TrustedHostMiddleware: it answers text/plain instead of application/problem+json, and it does
        # not read the body, so a client that still writes would see a reset connection instead of the 400.
        hosts = request.headers.getlist("host")
        # With two Host headers, a proxy in between may have checked the other one (RFC 9112, section 3.2: 400).
        if len(hosts) != 1 or _host_name(hosts[0]) not in self._hosts:
            raise HostNotAllowed("this Host is not allowed: add it to FORESHOCK_ALLOWED_HOSTS")
        if request.method in SAFE_METHODS:
            return
        origin = request.headers.get("origin")
        foreign = origin is not None and _address(origin) != hosts[0]
        if foreign or request.headers.get("sec-fetch-site") == "cross-site":
            raise CrossSiteRefused("requests from other sites' pages are refused")


def _address(origin: str) -> str | None:
    """Return the host and port of an Origin header; None if it is no origin."""
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return None


def _host_name(host: str) -> str:
    host = host.strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]
