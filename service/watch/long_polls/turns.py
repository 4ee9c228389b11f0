"""Turns of polls: a few are worked on at a time, so that a thousand that wake together delay no other request.

Every answer takes about a millisecond of the event loop. Without turns a thousand of them would come before the next
request that arrives; with turns, that request waits for a few of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import Request
from starlette.types import ASGIApp, Receive, Scope, Send

TURNS = 24
_POLLED = ("/lr-advice", "/alerts")
_KEY = "foreshock.turn"


class Turn:
    """The turn of one poll: held while it is worked on, given away while it waits for a read or a change."""

    def __init__(self, turns: asyncio.Semaphore) -> None:
        self._turns = turns
        self._held = False

    async def take(self) -> None:
        """Wait for the turn."""
        await self._turns.acquire()
        self._held = True

    def give_away(self) -> None:
        """Let others take it."""
        if self._held:
            self._held = False
            self._turns.release()

    @asynccontextmanager
    async def given_away(self) -> AsyncIterator[None]:
        """Give the turn away for the length of the block: those who wait for the same read can all join it."""
        self.give_away()
        yield
        await self.take()


class PollTurns:
    """Middleware that makes polls take turns."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._turns = asyncio.Semaphore(TURNS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve the request, a poll in its turn."""
        if scope["type"] != "http" or scope["method"] != "GET" or not scope["path"].endswith(_POLLED):
            await self._app(scope, receive, send)
            return
        turn = Turn(self._turns)
        await turn.take()
        scope[_KEY] = turn
        try:
            await self._app(scope, receive, send)
        finally:
            turn.give_away()


def turn_of(request: Request) -> Turn:
    """Return the turn of a request, which is a poll."""
    turn: Turn = request.scope[_KEY]
    return turn
