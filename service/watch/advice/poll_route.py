"""The route of polling trainers, ahead of the declared one (`endpoints.py`): the same answers for a quarter of the CPU.

A thousand trainers that a change wakes poll again at once. For each poll the framework would match every route, solve
its dependencies and authenticate in a thread of its own; here the key is read once for all polls that arrive together.
This route takes polls by a run's id with valid parameters and a key, or no key. All others, and so every error about
parameters, go to the declared route, which the OpenAPI document describes.
"""

from __future__ import annotations

import re
from typing import cast
from urllib.parse import parse_qsl

from starlette.datastructures import URLPath
from starlette.requests import Request
from starlette.routing import BaseRoute, Match, NoMatchFound
from starlette.types import Receive, Scope, Send

from service.platform.context import ServiceContext
from service.platform.identifiers import is_identifier
from service.platform.keys.service import Scope as KeyScope
from service.platform.schemas import LARGEST_STEP
from service.platform.security import SESSION_COOKIE, admit, check_scope, principal_of_key
from service.watch.advice.polling import LONGEST_WAIT_SECONDS, Poll, answer_poll
from service.watch.long_polls.turns import turn_of
from service.watch.long_polls.waiters import LongPolls

_BEGIN, _END = "/v1/runs/", "/lr-advice"
_BEARER = b"Bearer "
_COOKIE = SESSION_COOKIE.encode()
_POLL = "foreshock.poll"
_NUMBER = re.compile(r"\d{1,10}")
_SECONDS = re.compile(r"\d{1,2}(\.\d{1,6})?")
_FLAGS = {"true": True, "false": False}


class PollRoute(BaseRoute):
    """Route of the polls of one application."""

    path = f"{_BEGIN}{{run}}{_END}"

    def __init__(self, context: ServiceContext, polls: LongPolls) -> None:
        self._context = context
        self._polls = polls

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Return a full match for a poll that this route takes."""
        if scope["type"] != "http" or scope["method"] != "GET" or not scope["path"].endswith(_END):
            return Match.NONE, {}
        found = poll_of(scope)
        if found is None:
            return Match.NONE, {}
        return Match.FULL, {"route": self, "endpoint": self, _POLL: found}

    def url_path_for(self, name: str, /, **path_params: object) -> URLPath:
        """Raise NoMatchFound: the declared route has the name."""
        raise NoMatchFound(name, path_params)

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer the poll. Raises ProblemError."""
        secret, poll = cast("tuple[str | None, Poll]", scope[_POLL])
        request = Request(scope)
        async with turn_of(request).given_away():
            principal = await self._polls.read(principal_of_key, secret)
            principal = admit(self._context, request, principal)
            check_scope(principal, KeyScope.READ)
            response = await answer_poll(self._context, self._polls, principal, poll)
        await response(scope, receive, send)


def poll_of(scope: Scope) -> tuple[str | None, Poll] | None:
    """Return the secret and the poll of a request; None if the declared route must answer it."""
    path: str = scope["path"]
    run = path[len(_BEGIN) : -len(_END)]
    if not path.startswith(_BEGIN) or not is_identifier("run", run):
        return None
    secret: str | None = None
    if_none_match: str | None = None
    for name, value in scope["headers"]:
        if name == b"authorization":
            if secret is not None or not value.startswith(_BEARER):
                return None
            secret = value[len(_BEARER) :].decode("latin-1").strip()
        elif name == b"if-none-match":
            if if_none_match is not None or len(value) > 1000:
                return None
            if_none_match = value.decode("latin-1")
        elif name == b"cookie" and _COOKIE in value:
            return None
    parameters = _parameters(scope["query_string"])
    if parameters is None or secret == "":
        return None
    return secret, Poll(run, *parameters, if_none_match)


def _parameters(query: bytes) -> tuple[int | None, float, bool] | None:
    """Return (step, wait, follow); None if one is unknown, repeated or out of its range."""
    pairs = parse_qsl(query.decode("latin-1"), keep_blank_values=True)
    values = dict(pairs)
    if len(values) != len(pairs) or not values.keys() <= {"step", "wait", "follow"}:
        return None
    step, wait, follow = values.get("step"), values.get("wait", "0"), _FLAGS.get(values.get("follow", "false"))
    if follow is None or not _SECONDS.fullmatch(wait) or (step is not None and not _NUMBER.fullmatch(step)):
        return None
    if float(wait) > LONGEST_WAIT_SECONDS or (step is not None and int(step) > LARGEST_STEP):
        return None
    return None if step is None else int(step), float(wait), follow
