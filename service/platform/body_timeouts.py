"""Timeouts of request bodies: one that stops coming, or trickles, is refused with 408 and its connection closed."""

from __future__ import annotations

import asyncio
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from foreshock_service.platform.problem import BodyRefused, RequestTimeout, problem_response
from foreshock_service.platform.settings import Settings

_CLOSE = {"Connection": "close"}


def _stalled(detail: str) -> BodyRefused:
    return BodyRefused(RequestTimeout(detail, headers=_CLOSE))


class BodyTimeouts:
    """Middleware that bounds the pauses of every body and, after the longest pause, its average speed."""

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app = app
        self._seconds = settings.body_stall_seconds
        self._least = settings.body_least_bytes_per_second

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve the request, or answer 408 if what reads its body is not a route."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            await self._app(scope, self._timed(receive), send)
        except BodyRefused as error:
            # Raised before an answer began: nothing reads a body afterwards.
            await problem_response(error.problem)(scope, receive, send)

    def _timed(self, receive: Receive) -> Receive:
        begin = time.monotonic()
        received = 0
        is_complete = False

        async def receive_timed() -> Message:
            nonlocal received, is_complete
            if is_complete:
                # What comes next is the end of the connection.
                return await receive()
            try:
                async with asyncio.timeout(self._seconds):
                    message = await receive()
            except TimeoutError:
                raise _stalled(
                    f"no byte of the body came for {self._seconds:g} s (FORESHOCK_BODY_STALL_SECONDS): send it again"
                ) from None
            received += len(message.get("body", b""))
            is_complete = message["type"] != "http.request" or not message.get("more_body", False)
            seconds = time.monotonic() - begin
            if not is_complete and seconds > self._seconds and received < seconds * self._least:
                raise _stalled(
                    f"{received:,} bytes of the body came in {seconds:.0f} s, fewer than {self._least:,} a second "
                    "(FORESHOCK_BODY_LEAST_BYTES_PER_SECOND): send it again"
                )
            return message

        return receive_timed
