"""OpenAPI document that declares every error of every operation by its status, with its problem types.

The problems of a route are read from its code, so that no separate list is needed. They are the error classes to which
the endpoint and its dependencies refer, directly or through functions and classes of the service. Calls of methods are
followed for the parts of the context (`context.decoders.run`) and for parameters annotated with a class of the service.
Events are not followed.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from inspect import isclass, isfunction, ismodule, unwrap
from types import CodeType, FunctionType
from typing import Any, get_type_hints

from fastapi import FastAPI, params
from fastapi.routing import APIRoute

from foreshock.errors import PROBLEM_TYPE_PREFIX
from foreshock_service.platform import context, problem, request_guards, uploads

Problem = type[problem.ProblemError]

_OWN = "foreshock_service."
# Answers of middleware and handlers. Any request may have a body, but only some routes read it.
_EVERY_ROUTE = {
    request_guards.HostNotAllowed,
    problem.LimitExceeded,
    problem.UnsupportedMediaType,
    problem.InternalError,
}
_EVERY_ROUTE |= {problem.DatabaseUnavailable, problem.StorageUnavailable}
_UNSAFE = {request_guards.CrossSiteRefused, problem.StorageFull}
_WITH_BODY = {problem.RequestTimeout, problem.BadRequest}
_REFERENCE = {"$ref": "#/components/schemas/ProblemDocument"}


def document_problems(app: FastAPI, routes: Sequence[APIRoute]) -> None:
    """Replace the framework's error schemas by the problem document in the application's OpenAPI document."""
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _with_problems(generate(), routes)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _with_problems(document: dict[str, Any], routes: Sequence[APIRoute]) -> dict[str, Any]:
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    schemas.pop("HTTPValidationError", None)
    schemas.pop("ValidationError", None)
    document_schema = problem.ProblemDocument.model_json_schema(ref_template="#/components/schemas/{model}")
    schemas.update(document_schema.pop("$defs", {}))
    schemas["ProblemDocument"] = document_schema
    for route in routes:
        for method in route.methods:
            operation = document["paths"].get(route.path_format, {}).get(method.lower())
            if operation is None:
                continue
            # FastAPI's own 422 has another schema.
            operation["responses"].pop("422", None)
            by_status: defaultdict[int, list[Problem]] = defaultdict(list)
            for each in problems_of(route, method, has_body="requestBody" in operation):
                by_status[each.status].append(each)
            for status, group in sorted(by_status.items()):
                operation["responses"].setdefault(str(status), _response(group))
    return document


def _response(problems: list[Problem]) -> dict[str, Any]:
    problems.sort(key=lambda each: each.problem_type)
    names = [PROBLEM_TYPE_PREFIX + each.problem_type for each in problems]
    schema = {"allOf": [_REFERENCE, {"properties": {"type": {"enum": names}}}]}
    text = " ".join(
        f"`{each.problem_type}`: {' '.join((each.__doc__ or '').partition(chr(10) * 2)[0].split())}"
        for each in problems
    )
    return {"description": text, "content": {problem.PROBLEM_MEDIA_TYPE: {"schema": schema}}}


def problems_of(route: APIRoute, method: str, *, has_body: bool) -> set[Problem]:
    """Return the problem classes with which a route can answer a request of this method."""
    found: set[Problem] = set(_EVERY_ROUTE)
    for function in _with_dependencies(route.endpoint):
        found |= _raised(function)
    if route.path.startswith("/v1/"):
        # Every route of the API refuses unknown query parameters.
        found.add(problem.InvalidRequest)
    found = found - _UNSAFE if method.upper() in request_guards.SAFE_METHODS else found | _UNSAFE
    # The library checks uploaded tables; its errors are not problem classes.
    if uploads.UploadIncomplete in found:
        found.add(problem.InvalidRollouts)
    return found | _WITH_BODY if has_body or uploads.UploadIncomplete in found else found


def _with_dependencies(call: Callable[..., Any]) -> Iterator[FunctionType]:
    """Yield a function and the functions that its parameters depend on."""
    function = unwrap(call)
    if not isfunction(function):
        return
    yield function
    for hint in get_type_hints(function, include_extras=True).values():
        for each in getattr(hint, "__metadata__", ()):
            if isinstance(each, params.Depends) and each.dependency is not None:
                yield from _with_dependencies(each.dependency)


@cache
def _raised(function: FunctionType) -> frozenset[Problem]:
    """Return the problems that a function refers to, directly or through other functions and classes."""
    found: set[Problem] = set()
    seen: set[tuple[CodeType, type | None]] = set()
    waiting: list[tuple[FunctionType, type | None]] = [(function, None)]
    while waiting:
        current, owner = waiting.pop()
        if (current.__code__, owner) in seen:
            continue
        seen.add((current.__code__, owner))
        names = _names(current.__code__)
        for value in _named(current, names, owner):
            if value is problem.ProblemError:
                # It is caught there: only its subclasses have a status.
                continue
            if isclass(value) and issubclass(value, problem.ProblemError):
                found.add(value)
            elif isclass(value):
                # Other code may call a subclass through its base class of the service, so all its methods count.
                derives = any(base.__module__.startswith(_OWN) for base in value.__mro__[1:])
                called = frozenset(dir(value)) if derives else names | {"__init__", "__post_init__"}
                waiting += [(method, value) for method in _methods(value, called)]
            else:
                is_method = owner is not None and value.__qualname__.startswith(f"{owner.__qualname__}.")
                waiting.append((value, owner if is_method else None))
    return frozenset(found)


def _named(function: FunctionType, names: frozenset[str], owner: type | None) -> Iterator[Any]:
    """Yield the service's functions and classes that a function refers to, and methods of `owner`, its class."""
    for name in names & function.__globals__.keys():
        # Context managers, for example, are wrapped.
        value = unwrap(function.__globals__[name])
        if ismodule(value) and value.__name__.startswith(_OWN):
            yield from filter(_is_own, (unwrap(vars(value)[each]) for each in names & vars(value).keys()))
        elif _is_own(value):
            yield value
        else:
            yield from _of_row(value)
    if owner is not None:
        yield from _methods(owner, names)
    for annotation in function.__annotations__.values():
        if isclass(annotation) and _is_own(annotation):
            yield from _methods(annotation, names)
    parts = _parts_of_context()
    yield from (parts[name] for name in names & parts.keys())


def _of_row(value: object) -> Iterator[Any]:
    """Yield the service's functions and classes that a row of a table of kinds (a dataclass of the service) holds."""
    if is_dataclass(value) and type(value).__module__.startswith(_OWN):
        yield type(value)
        for field in fields(value):
            held = getattr(value, field.name)
            yield from (held,) if _is_own(held) else _of_row(held)


def _names(code: CodeType) -> frozenset[str]:
    """Return the names of globals and attributes in a function and the functions within it."""
    within = (_names(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return frozenset(code.co_names).union(*within)


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


@cache
def _parts_of_context() -> dict[str, type]:
    hints = get_type_hints(context.ServiceContext)
    return {name: hint for name, hint in hints.items() if isclass(hint) and hint.__module__.startswith(_OWN)}
