"""Routes ahead of declared ones: the same answers, for requests that are made so often that their CPU time counts.

For each request the framework matches every route, solves its dependencies, and reads the key in a thread of its own:
about 3 ms of CPU time. A plain route takes the requests in their usual form, with valid parameters and a key or none.
All others, and so every error about parameters, go to the declared route, which the OpenAPI document describes.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection
from typing import Generic, NamedTuple, TypeVar
from urllib.parse import parse_qsl

from starlette.datastructures import URLPath
from starlette.routing import BaseRoute, Match, NoMatchFound
from starlette.types import Scope

from foreshock_service.platform.security import SESSION_COOKIE

_BEARER = b"Bearer "
_COOKIE = SESSION_COOKIE.encode()
_ASKED = "foreshock.asked"
_MOST_DIGITS = 10

Asked = TypeVar("Asked")


class Credentials(NamedTuple):
    """The key of a request; None: it has none."""

    secret: str | None


class PlainRoute(BaseRoute, Generic[Asked]):
    """Route of requests of this method, whose path has this ending; a subclass reads them in `asked_of` and answers in
    `handle`.
    """

    method = "GET"
    path: str
    ending: str

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Return a full match for a request that this route takes."""
        if scope["type"] != "http" or scope["method"] != self.method or not scope["path"].endswith(self.ending):
            return Match.NONE, {}
        asked = self.asked_of(scope)
        if asked is None:
            return Match.NONE, {}
        return Match.FULL, {"route": self, "endpoint": self, _ASKED: asked}

    def url_path_for(self, name: str, /, **path_params: object) -> URLPath:
        """Raise NoMatchFound: the declared route has the name."""
        raise NoMatchFound(name, path_params)

    @abstractmethod
    def asked_of(self, scope: Scope) -> Asked | None:
        """Return what a request asks for; None if the declared route must answer it."""

    def asked(self, scope: Scope) -> Asked:
        """Return what the request of a match asks for."""
        found: Asked = scope[_ASKED]
        return found


def credentials_of(scope: Scope) -> Credentials | None:
    """Return the key of a request; None if the declared route must read it: a session's, repeated, of another form."""
    secret: str | None = None
    for name, value in scope["headers"]:
        if name == b"authorization":
            if secret is not None or not value.startswith(_BEARER):
                return None
            secret = value[len(_BEARER) :].decode("latin-1").strip()
        elif name == b"cookie" and _COOKIE in value:
            return None
    return None if secret == "" else Credentials(secret)


def parameters_of(scope: Scope, known: Collection[str]) -> dict[str, str] | None:
    """Return the query parameters of a request; None if one is repeated or not among the known ones."""
    pairs = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
    values = dict(pairs)
    return values if len(values) == len(pairs) and values.keys() <= set(known) else None


def whole_number(text: str, least: int, largest: int) -> int | None:
    """Return a number that is written in decimal digits only, if it is in its range."""
    if not (text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS):
        return None
    number = int(text)
    return number if least <= number <= largest else None
