"""A request that changes something: its method, its JSON body, and how its answer is read."""

from __future__ import annotations

import enum
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final, Literal, TypeVar

from foreshock.errors import ConfigurationError
from foreshock.reading.request import Method, Query, Request, json_request

__all__ = ["UNCHANGED", "Unchanged", "given", "json_change"]

Answer = TypeVar("Answer")


class Unchanged(enum.Enum):
    """The kind of `UNCHANGED`: the default of fields in which None means that a value is removed."""

    UNCHANGED = "unchanged"

    def __repr__(self) -> str:
        return self.name


UNCHANGED: Final[Literal[Unchanged.UNCHANGED]] = Unchanged.UNCHANGED


def given(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that are not None."""
    return {name: value for name, value in body.items() if value is not None}


def json_change(
    method: Method,
    path: str,
    read: Callable[[Mapping[str, Any]], Answer],
    body: Mapping[str, Any] | None = None,
    *,
    query: Query = (),
    in_project: bool = True,
    is_repeatable: bool = True,
) -> Request[Answer]:
    """Return a request whose answer is a JSON object. Raises ConfigurationError if the body is no JSON."""
    return replace(
        json_request(path, query, read, in_project=in_project),
        method=method,
        content=None if body is None else _json(body),
        is_repeatable=is_repeatable,
    )


def _json(value: Mapping[str, Any]) -> bytes:
    try:
        return json.dumps(value, allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"arguments must be JSON values with finite numbers: {error}") from error
