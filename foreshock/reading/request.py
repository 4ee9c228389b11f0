"""A request and how its answer is read, without sending it: `foreshock/reading/caller.py` sends it."""

import enum
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, Literal, TypeVar

from foreshock.client.connection import QueryValue

HttpMethod = Literal["GET", "POST", "PUT", "PATCH", "DELETE"]
Answer_co = TypeVar("Answer_co", covariant=True)
Item_co = TypeVar("Item_co", covariant=True)

Query = Sequence[tuple[str, QueryValue]]

# The most that the service gives.
ITEMS_ON_A_PAGE = 500


class Unchanged(enum.Enum):
    """The kind of `UNCHANGED`: the default of fields in which None means that a value is removed."""

    UNCHANGED = "unchanged"

    def __repr__(self) -> str:
        return self.name


UNCHANGED: Final[Literal[Unchanged.UNCHANGED]] = Unchanged.UNCHANGED


@dataclass(frozen=True, slots=True)
class Request(Generic[Answer_co]):
    """One request. `read` makes the answer from the body; it raises KeyError, TypeError or ValueError if it cannot.

    `in_project`: the client's project is a parameter of the request. `wait_seconds`: a long poll, which is answered
    once the answer differs from the one that the reader has, or after that time. `content` is a JSON body.
    `is_repeatable`: the same request twice has the effect of one, so that it may be sent again after a failure.
    """

    path: str
    query: Query
    read: Callable[[bytes], Answer_co]
    accept: str = "application/json"
    in_project: bool = True
    wait_seconds: float = 0.0
    method: HttpMethod = "GET"
    content: bytes | None = None
    is_repeatable: bool = True

    @property
    def headers(self) -> dict[str, str]:
        """The headers of the request."""
        kind = {} if self.content is None else {"Content-Type": "application/json"}
        return {"Accept": self.accept, **kind}

    def parameters(self, project: str | None) -> list[tuple[str, QueryValue]]:
        """Return the parameters of the request, with the client's project if it is one of them."""
        wait = self.wait_seconds or None
        return [*self.query, ("project", project if self.in_project else None), ("wait", wait)]

    @property
    def asked(self) -> object:
        """What the answer depends on, as a key: not how long it is waited for."""
        return self.path, tuple(self.query), self.accept


@dataclass(frozen=True, slots=True)
class ItemPage(Generic[Item_co]):
    """One page: its items and the cursor of the next one."""

    items: tuple[Item_co, ...]
    next_cursor: str | None


@dataclass(frozen=True, slots=True)
class Listing(Generic[Item_co]):
    """A paged list; `read` makes an item."""

    path: str
    query: Query
    read: Callable[[Mapping[str, Any]], Item_co]
    in_project: bool = True
    is_paged: bool = True

    def page(self, cursor: str | None) -> Request[ItemPage[Item_co]]:
        """Return the request of the page at `cursor`; None: the first."""
        query = [*self.query, ("limit", ITEMS_ON_A_PAGE), ("cursor", cursor)] if self.is_paged else self.query
        return Request(self.path, query, self._page, in_project=self.in_project)

    def _page(self, body: bytes) -> ItemPage[Item_co]:
        value = json.loads(body)
        return ItemPage(tuple(self.read(item) for item in value["items"]), value.get("next_cursor"))
