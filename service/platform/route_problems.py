"""The problems that each route can answer with, found in its code.

An endpoint and its dependencies are followed to the functions that they name, as far as these are of the service; an
error that one of them names is one that the route can raise. So no list beside the code has to be kept. Calls through
objects are followed for the parts of the context (`context.decoders.run`); events and background work are not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from inspect import isclass, isfunction, ismodule, unwrap
from types import CodeType, FunctionType
from typing import Any, get_type_hints

from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute

from foreshock_service.platform.context import ServiceContext
from foreshock_service.platform.guards import HostNotAllowed
from foreshock_service.platform.problem import (
    BadRequest,
    InternalError,
    InvalidRequest,
    InvalidRollouts,
    LimitExceeded,
    ProblemError,
    RequestTimeout,
    UnsupportedMediaType,
)
from foreshock_service.platform.request_bodies import InvalidBodyEncoding
from foreshock_service.platform.security import SAFE_METHODS, CrossSiteRefused
from foreshock_service.platform.storage_errors import DatabaseUnavailable, StorageFull, StorageUnavailable
from foreshock_service.platform.uploads import UploadIncomplete

Problems = frozenset[type[ProblemError]]

_OWN = "service."
_API = "/v1/"
# What middleware and handlers answer with; a body may come with any request, but only some read it.
_EVERY_ROUTE: Problems = frozenset(
    {HostNotAllowed, LimitExceeded, UnsupportedMediaType, InternalError, DatabaseUnavailable, StorageUnavailable}
)
_UNSAFE: Problems = frozenset({CrossSiteRefused, StorageFull})
_WITH_BODY: Problems = frozenset({RequestTimeout, InvalidBodyEncoding, BadRequest})
# The library's errors of tables that are sent; an upload says that it ended early.
_TABLE_SENT: Problems = frozenset({InvalidRollouts})


def problems_of(route: APIRoute, method: str, *, has_body: bool) -> Problems:
    """Return the classes of the problems that a route can answer a request of this method with."""
    found = set(_EVERY_ROUTE)
    for function in _calls(route.dependant):
        found |= _raised(function)
    if route.path.startswith(_API):
        # Also for a query parameter that no route has.
        found.add(InvalidRequest)
    if method.upper() in SAFE_METHODS:
        found -= _UNSAFE
    else:
        found |= _UNSAFE
    if has_body or UploadIncomplete in found:
        found |= _WITH_BODY
    if UploadIncomplete in found:
        found |= _TABLE_SENT
    return frozenset(found)


def _calls(dependant: Dependant) -> Iterator[FunctionType]:
    if dependant.call is not None:
        function = unwrap(dependant.call)
        if isfunction(function):
            yield function
    for each in dependant.dependencies:
        yield from _calls(each)


@cache
def _raised(function: FunctionType) -> Problems:
    """Return the problems that a function names, or one that it names does, and so on."""
    found: set[type[ProblemError]] = set()
    seen: set[tuple[CodeType, type | None]] = set()
    waiting: list[tuple[FunctionType, type | None]] = [(function, None)]
    while waiting:
        current, owner = waiting.pop()
        if (current.__code__, owner) in seen:
            continue
        seen.add((current.__code__, owner))
        names = _names(current.__code__)
        for value in _named(current, names, owner):
            if isclass(value) and issubclass(value, ProblemError):
                found.add(value)
            elif isclass(value):
                # What derives from a class of the service is called by the names of that class, elsewhere.
                derives = any(base.__module__.startswith(_OWN) for base in value.__mro__[1:])
                called = frozenset(dir(value)) if derives else names | {"__init__", "__post_init__"}
                waiting += [(method, value) for method in _methods(value, called)]
            else:
                waiting.append((value, owner if value.__qualname__.startswith(_prefix(owner)) else None))
    return frozenset(found)


def _named(function: FunctionType, names: frozenset[str], owner: type | None) -> Iterator[Any]:
    """Yield the functions and classes of the service that a function names, and methods of `owner`, its class."""
    for name in names & function.__globals__.keys():
        # Context managers, for one, are wrapped.
        value = unwrap(function.__globals__[name])
        if ismodule(value) and value.__name__.startswith(_OWN):
            yield from (
                each for each in (unwrap(vars(value)[name]) for name in names & vars(value).keys()) if _is_own(each)
            )
        elif _is_own(value):
            yield value
    if owner is not None:
        yield from _methods(owner, names)
    for name in names & _parts_of_context().keys():
        yield _parts_of_context()[name]


def _names(code: CodeType) -> frozenset[str]:
    """Return the names of globals and attributes in a function and the functions within it."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= _names(constant)
    return frozenset(names)


def _methods(owner: type, names: frozenset[str]) -> list[FunctionType]:
    found = []
    for base in owner.__mro__:
        if base.__module__.startswith(_OWN):
            for name in names & vars(base).keys():
                value = unwrap(getattr(vars(base)[name], "__func__", vars(base)[name]))
                if isfunction(value):
                    found.append(value)
    return found


def _is_own(value: object) -> bool:
    return (isfunction(value) or isclass(value)) and value.__module__.startswith(_OWN)


def _prefix(owner: type | None) -> str:
    return "\0" if owner is None else f"{owner.__qualname__}."


@cache
def _parts_of_context() -> Mapping[str, type]:
    hints = get_type_hints(ServiceContext)
    return {name: hint for name, hint in hints.items() if isclass(hint) and hint.__module__.startswith(_OWN)}
