"""An entity tag on every JSON answer to a GET that has none of its own, and 304 to those who have the answer already.

The tag is a digest of the body: the work of the answer is done all the same, only its bytes are not sent again.
"""

from __future__ import annotations

import hashlib

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from foreshock_service.platform.etag import matches

_API = "/v1/"
_JSON = "application/json"


class ContentTags:
    """ASGI middleware; answers that come in several parts and those with a tag pass unchanged."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http" or scope["method"] != "GET" or not scope["path"].startswith(_API):
            await self._app(scope, receive, send)
            return
        known = Headers(scope=scope).get("if-none-match")
        held: Message | None = None

        async def send_tagged(message: Message) -> None:
            nonlocal held
            if message["type"] == "http.response.start" and _is_tagged_here(message):
                held = message
                return
            if held is not None:
                start, held = held, None
                if message["type"] == "http.response.body" and not message.get("more_body", False):
                    start, message = _with_tag(start, message, known)
                await send(start)
            await send(message)

        await self._app(scope, receive, send_tagged)


def content_etag(body: bytes) -> str:
    """Return the entity tag of a body; weak, since its compressed forms share it."""
    return f'W/"{hashlib.blake2b(body, digest_size=12).hexdigest()}"'


def _is_tagged_here(start: Message) -> bool:
    headers = Headers(raw=start["headers"])
    return start["status"] == 200 and "etag" not in headers and headers.get("content-type", "").startswith(_JSON)


def _with_tag(start: Message, body: Message, known: str | None) -> tuple[Message, Message]:
    etag = content_etag(body.get("body", b""))
    headers = MutableHeaders(raw=list(start["headers"]))
    headers["ETag"] = etag
    headers.setdefault("Cache-Control", "private, no-cache")
    if not matches(known, etag):
        return {**start, "headers": headers.raw}, body
    for name in ("content-length", "content-type"):
        del headers[name]
    return {**start, "status": 304, "headers": headers.raw}, {**body, "body": b""}
