"""Plain routes of long polls: the key is read once for all polls that arrive together."""

from __future__ import annotations

import re
from abc import abstractmethod
from typing import Generic, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from foreshock_service.platform.context import ServiceContext
from foreshock_service.platform.identifiers import is_identifier
from foreshock_service.platform.keys.service import Scope as KeyScope
from foreshock_service.platform.plain_routes import PlainRoute, credentials_of
from foreshock_service.platform.security import Principal, admit, check_scope, principal_of_key
from foreshock_service.watch.long_polls.turns import turn_of
from foreshock_service.watch.long_polls.waiters import LONGEST_WAIT_SECONDS, LongPolls

_BEGIN = "/v1/runs/"
_LONGEST_TAG = 1000
_SECONDS = re.compile(r"\d{1,2}(\.\d{1,6})?")

Poll = TypeVar("Poll")


class PollRoute(PlainRoute[tuple[str | None, Poll]], Generic[Poll]):
    """Route of polls of runs by id: `asked_of` gives the secret of the key and the poll."""

    def __init__(self, context: ServiceContext, polls: LongPolls) -> None:
        self._context = context
        self._polls = polls

    @abstractmethod
    async def answer(self, principal: Principal, poll: Poll) -> Response:
        """Return the answer, after a change if the poll waits for one. Raises ProblemError."""

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer the poll. Raises ProblemError."""
        secret, poll = self.asked(scope)
        request = Request(scope)
        async with turn_of(request).given_away():
            principal = await self._polls.read(principal_of_key, secret)
            principal = admit(self._context, request, principal)
            check_scope(principal, KeyScope.READ)
            response = await self.answer(principal, poll)
        await response(scope, receive, send)


def run_polled(scope: Scope, ending: str) -> tuple[str, str | None, str | None] | None:
    """Return (run, secret, If-None-Match) of a poll by a run's id; None if the declared route must answer it."""
    path: str = scope["path"]
    run = path[len(_BEGIN) : -len(ending)]
    if not path.startswith(_BEGIN) or not is_identifier("run", run):
        return None
    credentials = credentials_of(scope)
    known: list[bytes] = [value for name, value in scope["headers"] if name == b"if-none-match"]
    if credentials is None or len(known) > 1 or len(b"".join(known)) > _LONGEST_TAG:
        return None
    return run, credentials.secret, known[0].decode("latin-1") if known else None


def seconds_of(values: dict[str, str]) -> float | None:
    """Return the seconds of the parameter `wait`, 0 without it; None if it is not a number within the bounds."""
    text = values.get("wait", "0")
    if not _SECONDS.fullmatch(text) or float(text) > LONGEST_WAIT_SECONDS:
        return None
    return float(text)
