"""Pages of lists, and the cursors that continue them."""

import base64
import binascii
import json
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Generic, TypeVar

from fastapi import Query
from pydantic import BaseModel, Field
from sqlalchemy import ColumnElement, Select, tuple_
from sqlalchemy.orm import InstrumentedAttribute, Session

from foreshock.parsing import parse_json
from foreshock_service.platform.parameters import LARGEST_INTEGER, is_storable_text
from foreshock_service.platform.problem import ProblemError

Item = TypeVar("Item")
CursorKey = tuple[str | int, ...]

DEFAULT_LIMIT, LARGEST_LIMIT = 50, 500
Limit = Annotated[int, Query(ge=1, le=LARGEST_LIMIT, description="items on a page")]
Cursor = Annotated[str | None, Query(max_length=1024, description="`next_cursor` of the page before")]


class InvalidCursor(ProblemError, status=422, problem_type="invalid-cursor"):
    """A cursor that was not made by a list of this kind."""


class Page(BaseModel, Generic[Item]):
    """One page of a list."""

    items: list[Item]
    next_cursor: str | None = Field(default=None, description="absent on the last page")


def encode_cursor(key: CursorKey) -> str:
    return base64.urlsafe_b64encode(json.dumps(list(key)).encode()).decode().rstrip("=")


def decode_cursor(cursor: str, shape: tuple[type, ...]) -> CursorKey:
    """Return the key inside a cursor; raises InvalidCursor unless its parts have the types in `shape`."""
    try:
        padded = cursor + "=" * (-len(cursor) % 4)
        parts = parse_json(base64.b64decode(padded, altchars=b"-_", validate=True))
    except (binascii.Error, ValueError) as error:
        raise InvalidCursor("the cursor is not from this list: start without a cursor") from error
    fits = isinstance(parts, list) and [type(part) for part in parts] == list(shape)
    # Both databases must accept the values as parameters.
    if not fits or not all(
        abs(part) <= LARGEST_INTEGER if isinstance(part, int) else is_storable_text(part) for part in parts
    ):
        raise InvalidCursor("the cursor is not from this list: start without a cursor")
    return tuple(parts)


def page_of(rows: Sequence[Item], limit: int, key_of: Callable[[Item], CursorKey]) -> Page[Item]:
    """Return a page of up to `limit` + 1 rows; the extra row only shows that there is a next page."""
    more = len(rows) > limit
    kept = list(rows[:limit])
    return Page(items=kept, next_cursor=encode_cursor(key_of(kept[-1])) if more else None)


def among(*chosen: tuple[InstrumentedAttribute[Any], Sequence[Any] | None]) -> list[ColumnElement[bool]]:
    """Return the conditions that columns have one of the values given for them; without values any will do."""
    return [column.in_(values) for column, values in chosen if values]


def page_of_query(
    session: Session,
    query: Select[*tuple[Any, ...]],
    columns: Sequence[InstrumentedAttribute[Any]],
    cursor: str | None,
    limit: int,
    read: Callable[[Sequence[Any]], Sequence[Item]],
    *,
    rising: bool = False,
) -> Page[Item]:
    """Return a page of the query's rows beyond a cursor, ordered by `columns`, a unique key of the first entity.

    The order is descending unless `rising`. `read` converts rows to items.
    """
    key = columns[0] if len(columns) == 1 else tuple_(*columns)
    if cursor is not None:
        after = decode_cursor(cursor, tuple(column.type.python_type for column in columns))
        beyond = after[0] if len(columns) == 1 else after
        query = query.where(key > beyond if rising else key < beyond)
    order = columns if rising else [column.desc() for column in columns]
    rows = session.execute(query.order_by(*order).limit(limit + 1)).all()
    items = list(read(rows[:limit]))
    if len(rows) <= limit:
        return Page(items=items)
    last = rows[limit - 1][0]
    return Page(items=items, next_cursor=encode_cursor(tuple(getattr(last, column.key) for column in columns)))
