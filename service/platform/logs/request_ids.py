"""Request ids: taken from `X-Request-Id` or made, returned in it, and part of every log line and problem document."""

from __future__ import annotations

import logging
import re
import secrets
import time
from contextvars import ContextVar

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER = "X-Request-Id"
# Nothing that could end a log line or a header.
_VALID = re.compile(r"[A-Za-z0-9._:-]{1,64}")
_current: ContextVar[str | None] = ContextVar("foreshock_request_id", default=None)
_logger = logging.getLogger("foreshock.requests")


def current_request_id() -> str | None:
    """Return the id of the request that this code serves; None outside of one."""
    return _current.get()


class RequestIds:
    """Middleware that gives each request its id and, if asked to, logs a line for each."""

    def __init__(self, app: ASGIApp, log_requests: bool) -> None:
        self._app = app
        self._logs = log_requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve the request under its id; one that is not valid is replaced."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        asked = Headers(scope=scope).get(HEADER, "")
        request_id = asked if _VALID.fullmatch(asked) else secrets.token_hex(16)
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[HEADER] = request_id
            await send(message)

        token = _current.set(request_id)
        begin = time.perf_counter()
        try:
            await self._app(scope, receive, send_with_id)
        finally:
            if self._logs:
                fields = {
                    "method": scope["method"],
                    "path": scope["path"],
                    "status": status,
                    "seconds": round(time.perf_counter() - begin, 6),
                    "client": (scope.get("client") or ("",))[0],
                    "user_agent": Headers(scope=scope).get("user-agent", ""),
                }
                _logger.info("%s %s %s", scope["method"], scope["path"], status, extra={"fields": fields})
            _current.reset(token)
