"""ASGI middleware around every request: Host and Origin checks, the body, and the answer to unexpected errors.

Plain ASGI middleware, because it counts the body without reading it.
"""

from __future__ import annotations

import logging
from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from foreshock.errors import HOST_NOT_ALLOWED
from foreshock_service.platform.keys import KeyLimits
from foreshock_service.platform.parameters import keep_encoded_slashes
from foreshock_service.platform.problem import InternalError, ProblemError, problem_response
from foreshock_service.platform.request_bodies import (
    CountedBody,
    DecompressedBody,
    body_encoding,
    body_limit,
    refuse_unread,
)
from foreshock_service.platform.security import SAFE_METHODS, CrossSiteRefused
from foreshock_service.platform.settings import Settings

_logger = logging.getLogger(__name__)


class HostNotAllowed(ProblemError):
    """A Host header that is not in the allow-list; the check prevents DNS rebinding."""

    status = 400
    problem_type = HOST_NOT_ALLOWED


class RequestGuard:
    """Middleware that checks Host, Origin and the size of the body: as declared, and again while it is received.

    Charges the bytes to the key of the request.
    """

    def __init__(self, app: ASGIApp, settings: Settings, limits: KeyLimits) -> None:
        self._app = app
        self._settings = settings
        self._limits = limits
        self._hosts = settings.host_allow_list

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve the request, or answer with a problem document."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope = keep_encoded_slashes(scope)
        request = Request(scope)
        try:
            self._check_origin(request)
            limit = body_limit(request, self._settings)
            encoding = body_encoding(request.headers.get("content-encoding"))
        except ProblemError as error:
            await refuse_unread(error, scope, receive, send, self._settings.max_json_bytes)
            return
        if request.method == "HEAD":
            # Every route that answers GET also answers HEAD (RFC 9110); the server leaves the body out.
            request = Request({**scope, "method": "GET"})
        body, state = CountedBody(receive, limit), request.state
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
        except Exception:
            if started:
                raise
            _logger.exception("unexpected error in %s %s", request.method, request.url.path)
            error = InternalError("the service failed: see its log")
            await problem_response(error)(request.scope, receive, send)

    def _check_origin(self, request: Request) -> None:
        # Not Starlette's TrustedHostMiddleware: it answers text/plain instead of application/problem+json, and it does
        # not read the body, so a client that still writes would see a reset connection instead of the 400.
        hosts = request.headers.getlist("host")
        # A second Host could be the one that a proxy in between looked at (RFC 9112, section 3.2: 400).
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
