"""Parameters of requests: undeclared query parameters are errors, and `%2F` in a path does not separate segments."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any
from urllib.parse import unquote

from fastapi import Request
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from starlette.types import Scope

from foreshock.errors import did_you_mean
from foreshock_service.platform.problem import InvalidRequest, ProblemItem

_API = "/v1/"
_STAND_IN = "\x1f"
_ENCODED_SLASH = re.compile(rb"%2f", re.IGNORECASE)

# The query parameters of each endpoint that was called with some.
_known: dict[Callable[..., Any], list[str]] = {}

SEGMENT_PATTERN = r"^[^\x00-\x1e\x7f]+$"
"""What a path parameter may hold that `decoded_segment` decodes: a name, and the stand-in of an encoded slash."""


def check_step_range(from_step: int, to_step: int) -> None:
    """Raise InvalidRequest unless `from_step` ≤ `to_step`."""
    if from_step > to_step:
        raise InvalidRequest(f"query.from_step: {from_step} is beyond to_step {to_step}")


async def refuse_unknown_parameters(request: Request) -> None:
    """Raise InvalidRequest naming each query parameter that the route of this request does not declare."""
    if not request.url.query or not request.url.path.startswith(_API):
        return
    known = _declared(request.scope["route"])
    listed = f"parameters: {', '.join(known)}" if known else "there are no parameters"
    items = [
        ProblemItem(
            location=f"query.{name}", message=f"unknown parameter {name!r}{did_you_mean(name, known)} ({listed})"
        )
        for name in dict.fromkeys(request.query_params)
        if name not in known
    ]
    if items:
        raise InvalidRequest("; ".join(f"{item.location}: {item.message}" for item in items), errors=items)


def _declared(route: APIRoute) -> list[str]:
    """Return the query parameters of a route and its dependencies, as its OpenAPI document has them."""
    if route.endpoint not in _known:
        paths = get_openapi(title="", version="", routes=[route])["paths"].values()
        declared = [each for path in paths for operation in path.values() for each in operation.get("parameters", ())]
        _known[route.endpoint] = sorted({each["name"] for each in declared if each["in"] == "query"})
    return _known[route.endpoint]


def keep_encoded_slashes(scope: Scope) -> Scope:
    """Return the scope of a request with a stand-in in its path for each encoded slash (RFC 3986, section 2.2).

    The framework decodes a path before it looks for a route, which makes every slash a separator. The stand-in is a
    control character that no name may contain; `decoded_segment` turns it into the slash.
    """
    raw: bytes = scope.get("raw_path") or b""
    if not _ENCODED_SLASH.search(raw):
        return scope
    path = _ENCODED_SLASH.sub(b"%1F", raw.partition(b"?")[0])
    return {**scope, "path": unquote(path.decode("ascii", "replace"))}


def decoded_segment(segment: str) -> str:
    """Return a path parameter with its slashes."""
    return segment.replace(_STAND_IN, "/")
