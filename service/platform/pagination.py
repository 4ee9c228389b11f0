"""Opaque keyset cursors: a page continues after the last row's key, so that rows added meanwhile do not shift it."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Callable, Sequence
from typing import Annotated, Generic, TypeVar

from fastapi import Query
from pydantic import BaseModel, Field

from foreshock_service.platform.problem import ProblemError
from foreshock_service.platform.schemas import LARGEST_INTEGER, is_storable_text

Item = TypeVar("Item")
CursorKey = tuple[str | int, ...]

DEFAULT_LIMIT, LARGEST_LIMIT = 50, 500
Limit = Annotated[int, Query(ge=1, le=LARGEST_LIMIT, description="items on a page")]
Cursor = Annotated[str | None, Query(max_length=1024, description="`next_cursor` of the page before")]


class InvalidCursor(ProblemError):
    """A cursor that was not made by a list of this kind."""

    status = 422
    problem_type = "invalid-cursor"


class Page(BaseModel, Generic[Item]):
    """One page of a list."""

    items: list[Item]
    next_cursor: str | None = Field(default=None, description="absent on the last page")


def encode_cursor(key: CursorKey) -> str:
    """Return the cursor that continues after `key`."""
    return base64.urlsafe_b64encode(json.dumps(list(key)).encode()).decode().rstrip("=")


def decode_cursor(cursor: str, shape: tuple[type, ...]) -> CursorKey:
    """Return the key inside a cursor; raises InvalidCursor unless its parts have the types in `shape`."""
    try:
        padded = cursor + "=" * (-len(cursor) % 4)
        parts = json.loads(base64.b64decode(padded, altchars=b"-_", validate=True))
    except (binascii.Error, ValueError, RecursionError) as error:
        raise InvalidCursor("the cursor is not from this list: start without a cursor") from error
    fits = isinstance(parts, list) and [type(part) for part in parts] == list(shape)
    if not fits or not all(map(_can_be_a_parameter, parts)):
        raise InvalidCursor("the cursor is not from this list: start without a cursor")
    return tuple(parts)


def _can_be_a_parameter(part: str | int) -> bool:
    """Return whether both databases take the value."""
    return abs(part) <= LARGEST_INTEGER if isinstance(part, int) else is_storable_text(part)


def page_of(rows: Sequence[Item], limit: int, key_of: Callable[[Item], CursorKey]) -> Page[Item]:
    """Return a page of up to `limit` + 1 rows; the extra row only shows that there is a next page."""
    more = len(rows) > limit
    kept = list(rows[:limit])
    return Page(items=kept, next_cursor=encode_cursor(key_of(kept[-1])) if more else None)
