"""Around every request: refuse foreign hosts, other sites' writes and bodies beyond the cap; answer for own faults.

Plain ASGI middleware, because it must not touch the body it only counts.
"""

from __future__ import annotations

import logging
from urllib.parse import urlsplit

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.platform.problem import (
    InternalError,
    LimitExceeded,
    ProblemError,
    UnsupportedMediaType,
    problem_response,
)
from service.platform.security import CrossSiteRefused
from service.platform.settings import Settings

PARQUET_MEDIA_TYPE = "application/vnd.apache.parquet"
_logger = logging.getLogger(__name__)
_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})


class HostNotAllowed(ProblemError):
    """The Host header is not one that this service answers to (this stops DNS rebinding)."""

    status = 400


class RequestGuard:
    """Checks Host, Origin and Content-Length, and cuts bodies that turn out longer than allowed."""

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app = app
        self._settings = settings
        self._hosts = settings.host_allow_list

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve the request, or answer with a problem."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = Request(scope)
        try:
            self._check_origin(request)
            limit = self._check_length(request)
        except ProblemError as error:
            await drain(receive, self._settings.max_json_bytes)
            await problem_response(error)(scope, receive, send)
            return
        if request.method == "HEAD":
            # Whatever answers GET answers HEAD (RFC 9110); the server leaves the body out.
            request = Request({**scope, "method": "GET"})
        await self._serve(request, _counted(receive, limit), send)

    async def _serve(self, request: Request, receive: Receive, send: Send) -> None:
        """Serve; an unforeseen error becomes a problem here: beyond, it would cost the client its connection."""
        started = False

        async def send_noting(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(request.scope, receive, send_noting)
        except Exception:
            if started:
                raise
            _logger.exception("unforeseen error in %s %s", request.method, request.url.path)
            error = InternalError("the service failed; its log says why")
            await problem_response(error)(request.scope, receive, send)

    def _check_origin(self, request: Request) -> None:
        if _host_name(request.headers.get("host", "")) not in self._hosts:
            raise HostNotAllowed("this Host is not allowed: add it to FORESHOCK_ALLOWED_HOSTS")
        if request.method in _SAFE_METHODS:
            return
        origin = request.headers.get("origin")
        foreign = origin is not None and urlsplit(origin).netloc != request.headers.get("host")
        if foreign or request.headers.get("sec-fetch-site") == "cross-site":
            raise CrossSiteRefused("requests from other sites' pages are refused")

    def _check_length(self, request: Request) -> int:
        if request.headers.get("content-encoding", "identity") != "identity":
            raise UnsupportedMediaType("send the body without Content-Encoding; Parquet is compressed inside")
        is_table = request.headers.get("content-type", "").partition(";")[0].strip() == PARQUET_MEDIA_TYPE
        limit = self._settings.max_body_bytes if is_table else self._settings.max_json_bytes
        declared = request.headers.get("content-length", "0")
        if declared.isdecimal() and int(declared) > limit:
            raise LimitExceeded(
                f"the body has {int(declared):,} bytes, more than the {limit:,} allowed: send more, smaller shards"
            )
        return limit


async def drain(receive: Receive, most_bytes: int) -> None:
    """Read and drop some of a refused body: a client that still writes would lose the answer to a reset connection."""
    while most_bytes > 0:
        message = await receive()
        if message["type"] != "http.request" or not message.get("more_body", False):
            return
        most_bytes -= len(message.get("body", b""))


def _counted(receive: Receive, limit: int) -> Receive:
    received = 0

    async def receive_counted() -> Message:
        nonlocal received
        message = await receive()
        received += len(message.get("body", b""))
        if received > limit:
            # The framework passes its own exception through where it reads a body; others become a 400.
            raise HTTPException(413, f"the body has more than the {limit:,} bytes allowed: send more, smaller shards")
        return message

    return receive_counted


def _host_name(host: str) -> str:
    host = host.strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]
