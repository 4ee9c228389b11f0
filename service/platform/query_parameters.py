"""Query parameters of the API: a name that the route does not declare is an error, not ignored."""

from __future__ import annotations

from fastapi import Request
from fastapi.dependencies.utils import get_flat_dependant
from fastapi.routing import APIRoute

from foreshock.suggestions import did_you_mean
from foreshock_service.platform.problem import InvalidRequest, ProblemItem

_API = "/v1/"
_KEPT = "foreshock_query_parameters"


def check_step_range(from_step: int, to_step: int) -> None:
    """Raise InvalidRequest unless `from_step` ≤ `to_step`."""
    if from_step > to_step:
        raise InvalidRequest(f"query.from_step: {from_step} is beyond to_step {to_step}")


def _declared(route: APIRoute) -> list[str]:
    """Return the declared names, which the framework collects anew at each call; kept with the route."""
    kept = vars(route)
    if _KEPT not in kept:
        kept[_KEPT] = sorted(parameter.alias for parameter in get_flat_dependant(route.dependant).query_params)
    known: list[str] = kept[_KEPT]
    return known


async def refuse_unknown_parameters(request: Request) -> None:
    """Raise InvalidRequest naming each query parameter that the route of this request does not declare."""
    if not request.url.query or not request.url.path.startswith(_API):
        return
    route = request.scope["route"]
    assert isinstance(route, APIRoute)
    known = _declared(route)
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
