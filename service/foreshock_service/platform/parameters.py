"""Parameters of requests, and shared types of fields."""

import math
import re
from collections.abc import Callable
from typing import Annotated, Any
from urllib.parse import unquote

from fastapi import APIRouter, Depends, Path, Query, Request
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from pydantic import AfterValidator, BeforeValidator, Field, StringConstraints
from starlette.types import Scope

from foreshock.api import runs
from foreshock.errors import did_you_mean
from foreshock_service.platform.problem import InvalidRequest, ProblemItem

LARGEST_STEP = runs.LARGEST_STEP
_DEEPEST = 16
LARGEST_INTEGER = 2**63 - 1
NO_NUL = r"^[^\x00]*$"
"""Pattern of texts: PostgreSQL stores no NUL and refuses to compare with one."""

Name = Annotated[str, StringConstraints(min_length=1, max_length=runs.LONGEST_NAME, pattern=runs.NAME_PATTERN)]
Step = Annotated[int, Field(ge=0, le=LARGEST_STEP)]
AttemptNumber = Annotated[int, Field(ge=1, le=LARGEST_STEP)]
StepPath = Annotated[int, Path(ge=0, le=LARGEST_STEP)]
AttemptQuery = Annotated[int, Query(ge=1, le=LARGEST_STEP)]
ActiveOrAttempt = Annotated[
    int | None, Query(ge=1, le=LARGEST_STEP, description="one attempt; absent: the active steps")
]
FromStep = Annotated[int, Query(ge=0, le=LARGEST_STEP)]
MaxPoints = Annotated[
    int | None, Query(ge=2, le=1_000_000, description="rows per curve, keeping the extremes of each; absent: all rows")
]
ToStep = Annotated[int, Query(ge=0, le=LARGEST_STEP, description="included")]


def is_storable_text(text: str) -> bool:
    """Return whether both databases can store the text: no NUL and no lone surrogate."""
    return "\x00" not in text and not any("\ud800" <= letter <= "\udfff" for letter in text)


def storable_json(value: dict[str, Any]) -> dict[str, Any]:
    """Return the value if JSONB can hold it; raises ValueError for NUL, non-finite numbers and too deep nesting."""
    _check_json(value, _DEEPEST)
    return value


def _check_json(value: Any, depth: int) -> None:
    if depth == 0:
        raise ValueError(f"is nested more than {_DEEPEST} levels deep")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("holds a number that is not finite")
    if isinstance(value, int) and abs(value) > LARGEST_INTEGER:
        raise ValueError("holds an integer beyond 64 bits")
    if isinstance(value, str):
        if not is_storable_text(value):
            raise ValueError("holds text that cannot be stored (NUL or a lone surrogate)")
    elif isinstance(value, dict):
        for key, item in value.items():
            _check_json(key, depth - 1)
            _check_json(item, depth - 1)
    elif isinstance(value, list):
        for item in value:
            _check_json(item, depth - 1)


JsonObject = Annotated[dict[str, Any], AfterValidator(storable_json)]


_API = "/v1/"
_STAND_IN = "\x1f"
_ENCODED_SLASH = re.compile(rb"%2f", re.IGNORECASE)

# Cache: the query parameters that an endpoint declares.
_known: dict[Callable[..., Any], list[str]] = {}

SEGMENT_PATTERN = r"^[^\x00-\x1e\x7f]+$"
"""Pattern of a path parameter that `decoded_segment` decodes: a name, with stand-ins for its encoded slashes."""


def at_most(count: int) -> BeforeValidator:
    """Return the validator of a mapping of up to `count` values. A larger one gives one error, not one per value."""

    def check(values: object) -> object:
        if isinstance(values, dict) and len(values) > count:
            raise ValueError(f"at most {count:,} values, got {len(values):,}")
        return values

    return BeforeValidator(check)


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
    unknown = [name for name in dict.fromkeys(request.query_params) if name not in known]
    if not unknown:
        return
    # There may be thousands of names, each as long as the headers allow, and comparing names is slow.
    items = [
        ProblemItem(
            location=f"query.{name[:60]}",
            message=f"unknown parameter {name[:60]!r}{did_you_mean(name[:60], known)} ({listed})",
        )
        for name in unknown[:20]
    ]
    raise InvalidRequest.of_items(items, len(unknown))


def api_router(**settings: Any) -> APIRouter:
    """Return a router whose routes refuse unknown query parameters; `settings` are those of APIRouter.

    An operation has the name of its function, which generators of clients take for theirs.
    """
    return APIRouter(
        dependencies=[Depends(refuse_unknown_parameters)],
        generate_unique_id_function=lambda route: route.name,
        **settings,
    )


def _declared(route: APIRoute) -> list[str]:
    """Return the query parameters of a route and its dependencies, as its OpenAPI document has them."""
    if route.endpoint not in _known:
        paths = get_openapi(title="", version="", routes=[route])["paths"].values()
        declared = [each for path in paths for operation in path.values() for each in operation.get("parameters", ())]
        _known[route.endpoint] = sorted({each["name"] for each in declared if each["in"] == "query"})
    return _known[route.endpoint]


def keep_encoded_slashes(scope: Scope) -> Scope:
    """Return the request's scope with each encoded slash of its path replaced by a stand-in (RFC 3986, section 2.2).

    The framework decodes a path before it looks for a route, which makes every slash a separator. The stand-in is a
    control character that no name may contain; `decoded_segment` turns it back into a slash.
    """
    raw: bytes = scope.get("raw_path") or b""
    if not _ENCODED_SLASH.search(raw):
        return scope
    path = _ENCODED_SLASH.sub(b"%1F", raw.partition(b"?")[0])
    return {**scope, "path": unquote(path.decode("ascii", "replace"))}


def decoded_segment(segment: str) -> str:
    """Return a path parameter with its encoded slashes restored."""
    return segment.replace(_STAND_IN, "/")
