"""A request and how its answer is read, without sending it: `foreshock/reading/caller.py` sends it."""

import enum
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Generic, Literal, TypeVar
from urllib.parse import quote

from foreshock.api.records import parse
from foreshock.client.connection import QueryValue
from foreshock.errors import ConfigurationError

Method = Literal["GET", "POST", "PUT", "PATCH", "DELETE"]
Answer = TypeVar("Answer")
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
    method: Method = "GET"
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
        return get(self._page, self.path, query, in_project=self.in_project)

    def _page(self, value: Mapping[str, Any]) -> ItemPage[Item_co]:
        return ItemPage(tuple(self.read(item) for item in value["items"]), value.get("next_cursor"))


Reading = type[Answer] | Callable[[Mapping[str, Any]], Answer]
"""How a JSON object is read: the record that it is, or a function."""


def get(
    read: Reading[Answer], path: str, query: Query = (), *, in_project: bool = True, wait_seconds: float = 0.0
) -> Request[Answer]:
    """Return a request whose answer is a JSON object."""
    return Request(path, query, _from_json(read), in_project=in_project, wait_seconds=wait_seconds)


def listing(read: Reading[Answer], path: str, query: Query = (), *, in_project: bool = True) -> Listing[Answer]:
    """Return a paged list of JSON objects."""
    return Listing(path, query, _reader_of(read), in_project)


def change(
    method: Method,
    path: str,
    read: Reading[Answer],
    body: Mapping[str, Any] | None = None,
    *,
    query: Query = (),
    in_project: bool = True,
    is_repeatable: bool = True,
) -> Request[Answer]:
    """Return a request that changes something. Raises ConfigurationError if the body is no JSON."""
    content = None if body is None else _json(body)
    return Request(
        path,
        query,
        _from_json(read),
        in_project=in_project,
        method=method,
        content=content,
        is_repeatable=is_repeatable,
    )


def given(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that are not None."""
    return {name: value for name, value in body.items() if value is not None}


def run_path(run: str, *parts: str | int) -> str:
    """Return the path of a run, by its id or key, and of what is below it."""
    return _path("/v1/runs", run, *parts)


def step_path(run: str, step: int, *parts: str | int) -> str:
    """Return the path of a step of a run, and of what is below it."""
    return run_path(run, "steps", step, *parts)


def probe_path(probe: str, *parts: str) -> str:
    """Return the path of a probe, by its id, and of what is below it."""
    return _path("/v1/probes", probe, *parts)


def several(name: str, values: Sequence[str]) -> list[tuple[str, QueryValue]]:
    """Return a parameter that is repeated for each value. Raises TypeError for one text instead of several."""
    return [(name, value) for value in names_of(name, values)]


def names_of(argument: str, values: Sequence[str]) -> list[str]:
    """Return the values of an argument. Raises TypeError for one text instead of several."""
    if isinstance(values, str):
        raise TypeError(f"{argument} takes several names, such as [{values!r}], got {values!r}")
    return list(values)


def _reader_of(read: Reading[Answer]) -> Callable[[Mapping[str, Any]], Answer]:
    return partial(parse, read) if isinstance(read, type) else read


def _from_json(read: Reading[Answer]) -> Callable[[bytes], Answer]:
    reader = _reader_of(read)
    return lambda body: reader(json.loads(body))


def _path(start: str, *parts: str | int) -> str:
    return "/".join([start, *(quote(str(part), safe="") for part in parts)])


def _json(value: Mapping[str, Any]) -> bytes:
    try:
        return json.dumps(value, allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"arguments must be JSON values with finite numbers: {error}") from error
