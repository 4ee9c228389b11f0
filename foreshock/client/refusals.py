"""Scope of a failed request: retry everything later, this run later, this item later, or never.

    service   no answer, 408, 425, 429, 502 to 504, a redirect; and refusals of every request of this client that a
              change of configuration corrects: 400 for its Host, 401, 421
    run       403 (the key lacks the scope or the project), 404 (no such run or attempt, or another service), and
              whatever else is refused when the run is registered
    item      413 (a limit of the service), other 5xx, and anything else that is no proof of an invalid item
    final     409 (other bytes are stored), 410 (the run was deleted), 422 (invalid): the same bytes fail again

Only `final` refusals reject an item. The others keep its bytes.
"""

from __future__ import annotations

from typing import Literal

from foreshock.errors import ServiceError, ServiceUnavailable
from foreshock.problem_types import HOST_NOT_ALLOWED, PROBLEM_TYPE_PREFIX

__all__ = ["Scope", "scope_of"]

Scope = Literal["service", "run", "item", "final"]

_HOST_NOT_ALLOWED = PROBLEM_TYPE_PREFIX + HOST_NOT_ALLOWED
_OF_EVERY_REQUEST = frozenset({401, 421, 502, 503, 504})
_OF_THE_RUN = frozenset({403, 404})
_FINAL = frozenset({409, 410})
_INVALID = 422


def scope_of(error: ServiceError, *, registering: bool) -> Scope:
    """Return what a failed request concerns; `registering`: it was that of the run or attempt, not of the item."""
    status = error.status
    if status is None or status in _OF_EVERY_REQUEST or error.problem.get("type") == _HOST_NOT_ALLOWED:
        return "service"
    if status in _OF_THE_RUN:
        return "run"
    if status in _FINAL:
        return "final"
    if isinstance(error, ServiceUnavailable) and status < 500:
        return "service"
    if registering and status < 500:
        return "run"
    return "final" if status == _INVALID else "item"
