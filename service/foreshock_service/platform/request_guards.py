"""What every connection and request passes before its route: bounds, an id, and checks of Host, Origin, key and body.

Connections are read by uvicorn's httptools protocol, which parses in C; h11 parses in Python, and a body in chunks of
one byte kept its event loop busy for two seconds per megabyte. The key is checked before the body is read. A body is
counted as it is received and never stored here. It may not be compressed as a whole. A body that stops coming is
refused with 408, so that it does not keep a place for uploads; slow headers, bodies that trickle and limits for each
address are left to a proxy.
"""

import asyncio
import logging
import re
import secrets
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import unquote, urlsplit

from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from structlog import contextvars
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from foreshock import errors, statistics_shards
from foreshock_service.platform import logs, problem
from foreshock_service.platform.settings import Settings

_logger = logging.getLogger(__name__)
_requests = logging.getLogger("foreshock.requests")
HEADER = "X-Request-Id"
# Nothing that could end a log line or a header.
_VALID_ID = re.compile(r"[A-Za-z0-9._:-]{1,64}")
PARQUET_MEDIA_TYPE = "application/vnd.apache.parquet"
_TABLES = (PARQUET_MEDIA_TYPE, statistics_shards.MEDIA_TYPE)
STALL_SECONDS = 30.0
"""Longest pause between two pieces of a body."""
API = "/v1/"
STAND_IN = "\x1f"
_ENCODED_SLASH = re.compile(rb"%2f", re.IGNORECASE)
# Cache: the query parameters that an endpoint declares.
_known: dict[Callable[..., Any], list[str]] = {}
# Limit of a page's form, which has a key, a token or a few numbers.
_FORM_BYTES = 64 * 1024


MOST_HEADER_BYTES = 65_536
"""Largest target and headers of one request."""


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's protocol that parses in C, with the bound on headers that it lacks."""

    # Bytes since the last request began, or since the last piece of its body: of headers, trailers and framing.
    _counted = 0

    def data_received(self, data: bytes) -> None:
        """Parse the received bytes; refuse the request if its headers are beyond the bound."""
        self._counted += len(data)
        super().data_received(data)
        if self._counted > MOST_HEADER_BYTES and not self.transport.is_closing():
            self.send_400_response("Invalid HTTP request received.")

    def on_message_begin(self) -> None:
        self._counted = 0
        super().on_message_begin()

    def on_body(self, body: bytes) -> None:
        self._counted = 0
        super().on_body(body)


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


class ReceivedBody:
    """The body of a request while it is received."""

    def __init__(self, receive: Receive, limit: int) -> None:
        self._receive = receive
        self._limit = limit
        self._is_complete = False
        self._received = 0

    async def receive(self) -> Message:
        """Receive an ASGI message. Raises BodyRefused: 413 beyond the limit, 408 if no byte came for STALL_SECONDS."""
        if self._is_complete:  # The next message is the end of the connection.
            return await self._receive()
        try:
            async with asyncio.timeout(STALL_SECONDS):
                message = await self._receive()
        except TimeoutError:
            late = f"no byte of the body came for {STALL_SECONDS:g} s: send it again"
            raise problem.BodyRefused(problem.RequestTimeout(late, headers={"Connection": "close"})) from None
        self._received += len(message.get("body", b""))
        if self._received > self._limit:
            large = f"the body has more than the {self._limit:,} bytes allowed: send more, smaller shards"
            raise problem.BodyRefused(problem.LimitExceeded(large))
        self._is_complete = message["type"] != "http.request" or not message.get("more_body", False)
        return message


def _keep_encoded_slashes(scope: Scope) -> Scope:
    """Return the request's scope with each encoded slash of its path replaced by a stand-in (RFC 3986, section 2.2).

    The framework decodes a path before it looks for a route, which makes every slash a separator. The stand-in is a
    control character that no name may contain; `parameters.decoded_segment` turns it back into a slash.
    """
    raw: bytes = scope.get("raw_path") or b""
    if not _ENCODED_SLASH.search(raw):
        return scope
    path = _ENCODED_SLASH.sub(b"%1F", raw.partition(b"?")[0])
    return {**scope, "path": unquote(path.decode("ascii", "replace"))}


async def refuse_unknown_parameters(request: Request) -> None:
    """Raise InvalidRequest naming each query parameter that the route of this request does not declare."""
    if not request.url.query or not request.url.path.startswith(API):
        return
    known = _declared(request.scope["route"])
    listed = f"parameters: {', '.join(known)}" if known else "there are no parameters"
    unknown = [name for name in dict.fromkeys(request.query_params) if name not in known]
    if not unknown:
        return
    # There may be thousands of names, each as long as the headers allow, and comparing names is slow.
    items = [
        problem.ProblemItem(
            location=f"query.{name[:60]}",
            message=f"unknown parameter {name[:60]!r}{errors.did_you_mean(name[:60], known)} ({listed})",
        )
        for name in unknown[:20]
    ]
    raise problem.InvalidRequest.of_items(items, len(unknown))


def _declared(route: APIRoute) -> list[str]:
    """Return the query parameters of a route and its dependencies, as its OpenAPI document has them."""
    if route.endpoint not in _known:
        paths = get_openapi(title="", version="", routes=[route])["paths"].values()
        declared = [each for path in paths for operation in path.values() for each in operation.get("parameters", ())]
        _known[route.endpoint] = sorted({each["name"] for each in declared if each["in"] == "query"})
    return _known[route.endpoint]


SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})


class CrossSiteRefused(problem.ProblemError, status=403, problem_type="cross-site-refused"):
    """A browser request that did not come from the service's own pages."""


class HostNotAllowed(problem.ProblemError, status=400, problem_type=errors.HOST_NOT_ALLOWED):
    """A Host header that is not in the allow-list; the check prevents DNS rebinding."""


class RequestGuard:
    """Middleware that checks Host, Origin, the key, and the size of the body: as declared, and while it is received.

    For a request of the API, `authenticate` is called in a thread before the body is read. It raises a problem, or
    stores the principal in the request's state for the route.
    """

    def __init__(self, app: ASGIApp, settings: Settings, authenticate: Callable[[Request], object]) -> None:
        self._app = app
        self._settings = settings
        self._hosts = settings.host_allow_list
        self._authenticate = authenticate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope = _keep_encoded_slashes(scope)
        request, started = Request(scope), False

        async def send_noting(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            self._check_origin(request)
            body = ReceivedBody(receive, body_limit(request, self._settings))
            if request.headers.get("content-encoding", "identity").strip().lower() != "identity":
                raise problem.UnsupportedMediaType(
                    "send the body without Content-Encoding: JSON as it is, and Parquet, which is compressed inside"
                )
            if request.method not in SAFE_METHODS and request.url.path.startswith(API):
                await run_in_threadpool(self._authenticate, request)
            # Every route that answers GET also answers HEAD (RFC 9110); the server leaves the body out.
            method = "GET" if request.method == "HEAD" else request.method
            await self._app({**scope, "method": method}, body.receive, send_noting)
        except Exception as error:
            if started:
                raise
            # The server would close the connection. It reads and discards what the client still sends of the body.
            found = problem.problem_of(request, error)
            if found is None:
                _logger.exception("unexpected error in %s %s", request.method, request.url.path)
                found = problem.InternalError("the service failed: see its log")
            await problem.problem_response(found)(scope, receive, send)

    def _check_origin(self, request: Request) -> None:
        # Not Starlette's TrustedHostMiddleware: it answers text/plain instead of application/problem+json.
        hosts = request.headers.getlist("host")
        # With two Host headers, a proxy in between may have checked the other one (RFC 9112, section 3.2: 400).
        if len(hosts) != 1 or _host_name(hosts[0]) not in self._hosts:
            raise HostNotAllowed("this Host is not allowed: add it to FORESHOCK_ALLOWED_HOSTS")
        if request.method in SAFE_METHODS:
            return
        origin = request.headers.get("origin")
        foreign = origin is not None and _address(origin) != hosts[0]
        if foreign or request.headers.get("sec-fetch-site", "none") not in ("same-origin", "none"):
            raise CrossSiteRefused("requests from other sites' pages are refused")


def _address(origin: str) -> str | None:
    """Return the host and port of an Origin header; None if it is not an origin."""
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return None


def _host_name(host: str) -> str:
    host = host.strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]


class RequestIds:
    """Middleware that gives each request an id (the caller's if valid), and logs each request if `log_requests`.

    The id is in the answer's `X-Request-Id`, in problem documents and in every line of the log.
    """

    def __init__(self, app: ASGIApp, log_requests: bool) -> None:
        self._app = app
        self._logs = log_requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        asked = headers.get(HEADER, "")
        request_id = asked if _VALID_ID.fullmatch(asked) else secrets.token_hex(16)
        status, begin = 0, time.perf_counter()

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[HEADER] = request_id
            await send(message)

        with contextvars.bound_contextvars(request_id=request_id):
            try:
                await self._app(scope, receive, send_with_id)
            finally:
                if self._logs:
                    seconds, client = round(time.perf_counter() - begin, 6), (scope.get("client") or ("",))[0]
                    values = (scope["method"], scope["path"], status, seconds, client, headers.get("user-agent", ""))
                    extra = dict(zip(logs.REQUEST_FIELDS, values, strict=True))
                    _requests.info("%s %s %s", scope["method"], scope["path"], status, extra=extra)
