"""Limits on request bodies: the declared length, the bytes that are received, and the refusal of unread bodies.

The body is counted as it is received and never stored here.
"""

from __future__ import annotations

import asyncio
import contextlib

from starlette.requests import Request
from starlette.types import Message, Receive, Scope, Send

from foreshock.statistics_shards import MEDIA_TYPE as STATISTICS_MEDIA_TYPE
from foreshock_service.platform.media_types import media_type_of
from foreshock_service.platform.problem import BodyRefused, LimitExceeded, ProblemError, problem_response
from foreshock_service.platform.settings import Settings

PARQUET_MEDIA_TYPE = "application/vnd.apache.parquet"
_TABLES = (PARQUET_MEDIA_TYPE, STATISTICS_MEDIA_TYPE)
# The longest time that a refused client may go on writing.
_LINGER_SECONDS = 2.0


def body_limit(request: Request, settings: Settings) -> int:
    """Return the most bytes that the request's body may have.

    Raises LimitExceeded if Content-Length is above the limit.
    """
    is_table = media_type_of(request) in _TABLES
    limit = settings.max_body_bytes if is_table else settings.max_json_bytes
    declared = request.headers.get("content-length", "0")
    if declared.isdecimal() and int(declared) > limit:
        raise LimitExceeded(
            f"the body has {int(declared):,} bytes, more than the {limit:,} allowed: send more, smaller shards"
        )
    return limit


async def refuse_unread(error: ProblemError, scope: Scope, receive: Receive, send: Send, most_bytes: int) -> None:
    """Answer before the body, then close the connection.

    A client that still writes would see a reset connection instead of the answer if it were closed at once. So the
    answer's end is sent after `most_bytes` or `_LINGER_SECONDS`, during which the body is read and discarded; its
    headers and its whole text are sent before.
    """

    async def send_lingering(message: Message) -> None:
        if message["type"] != "http.response.body":
            await send(message)
            return
        await send({**message, "more_body": True})
        # The latter is of a body that stalls.
        with contextlib.suppress(TimeoutError, BodyRefused):
            async with asyncio.timeout(_LINGER_SECONDS):
                await _discard(receive, most_bytes)
        await send({"type": "http.response.body"})

    error.headers = {**error.headers, "Connection": "close"}
    await problem_response(error)(scope, receive, send_lingering)


async def _discard(receive: Receive, most_bytes: int) -> None:
    while most_bytes > 0:
        message = await receive()
        if message["type"] != "http.request" or not message.get("more_body", False):
            return
        most_bytes -= len(message.get("body", b""))


def too_large(limit: int, how: str = "") -> BodyRefused:
    """Return the error for a body of more than `limit` bytes, counted `how`."""
    more = f"more than the {limit:,} bytes allowed{f', {how}' if how else ''}"
    return BodyRefused(LimitExceeded(f"the body has {more}: send more, smaller shards"))


class CountedBody:
    """The body of a request while it is received; `received` is its bytes so far."""

    def __init__(self, receive: Receive, limit: int) -> None:
        self._receive = receive
        self._limit = limit
        self.received = 0

    async def receive(self) -> Message:
        """Receive as ASGI does; raises BodyRefused (413) once the body has more than `limit` bytes."""
        message = await self._receive()
        self.received += len(message.get("body", b""))
        if self.received > self._limit:
            raise too_large(self._limit)
        return message
