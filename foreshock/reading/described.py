"""Methods of readers and operators, each described by a function that is never run.

    class Reader:
        @get("/v1/runs/{run}")
        def run(self, run: str) -> RunRecord:
            ...

Parameters that the path names are parts of it. The others are parameters of the query of a GET, under their own names
unless the decorator gives another, and fields of the JSON body of a change; None is left out. `wait_seconds` makes a
GET a long poll. The answer is read as the type that the function returns.

In a `Caller` the method returns the answer, or an iterator over a list; in an `AsyncCaller` a coroutine, or an async
iterator. `Reader.run.request("my-run")` returns only the request.
"""

from __future__ import annotations

import functools
import inspect
import json
import re
import typing
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar, overload
from urllib.parse import quote

from foreshock.api.diagnosis import Diagnosis, diagnosis_of
from foreshock.api.records import parse
from foreshock.api.runs import RunRecord, run_record
from foreshock.api.watch import AdviceRecord, advice_record
from foreshock.json_values import given, json_bytes
from foreshock.reading import columns
from foreshock.reading.caller import AsyncCaller, Caller, HttpMethod, Listing, Query, Request

Arguments = ParamSpec("Arguments")
Answer = TypeVar("Answer")
Item = TypeVar("Item")
Described = TypeVar("Described")
Sync = TypeVar("Sync")
Async = TypeVar("Async")
Function = Callable[Concatenate[Any, Arguments], Answer]
Values = dict[str, Any]
Read = Callable[[Any], Any]

# Readers of the JSON of these types; any other record is read by `parse`.
_READERS: Mapping[Any, Read] = {
    AdviceRecord: advice_record,
    Diagnosis: diagnosis_of,
    RunRecord: run_record,
    columns.Buckets: columns.buckets,
    columns.Measurements: columns.measurements,
    columns.Scalars: columns.scalars,
    columns.TokenIds: columns.token_ids,
    columns.Tokens: columns.tokens,
}


class Method(Generic[Arguments, Described, Sync, Async]):
    """A method that sends what a function describes, with its name, parameters and documentation."""

    def __init__(self, sender: str, function: Callable[..., Any], describe: Callable[[Any, Values], Described]) -> None:
        """`sender` is the method of the caller that sends it; `describe` gets the type of the answer, and arguments."""
        signature = inspect.signature(function)
        self._function, self._signature, self._describe = function, signature, describe

        def method(caller: Any, /, *arguments: Arguments.args, **named: Arguments.kwargs) -> Any:
            return getattr(caller, sender)(self.request(*arguments, **named))

        method.__name__, method.__doc__ = function.__name__, function.__doc__
        # An async caller returns another type.
        shown = signature.replace(return_annotation=inspect.Signature.empty)
        vars(method)["__signature__"] = vars(self)["__signature__"] = shown
        self.__name__, self.__doc__ = method.__name__, method.__doc__
        self._method = method

    def request(self, *arguments: Arguments.args, **named: Arguments.kwargs) -> Described:
        """Return the request, or the paged list, of these arguments. Raises TypeError, ConfigurationError."""
        bound = self._signature.bind(None, *arguments, **named)
        bound.apply_defaults()
        _, *values = bound.arguments.items()
        defaults = self._signature.parameters
        return self._describe(
            typing.get_type_hints(self._function)["return"],
            {name: names_of(name, each) if defaults[name].default == () else each for name, each in values},
        )

    def __call__(self, caller: Caller | AsyncCaller, /, *arguments: Arguments.args, **named: Arguments.kwargs) -> Any:
        """Send what the arguments describe, as the method of a caller does."""
        return self._method(caller, *arguments, **named)

    @overload
    def __get__(self, caller: None, kind: type) -> Self: ...
    @overload
    def __get__(self, caller: Caller, kind: type) -> Callable[Arguments, Sync]: ...
    @overload
    def __get__(self, caller: AsyncCaller, kind: type) -> Callable[Arguments, Async]: ...
    def __get__(self, caller: Any, kind: type) -> Any:
        return self if caller is None else self._method.__get__(caller, kind)


Call = Method[Arguments, Request[Answer], Answer, Coroutine[Any, Any, Answer]]
ListCall = Method[Arguments, Listing[Item], Iterator[Item], AsyncIterator[Item]]


def get(
    path: str, *, in_project: bool = True, fixed: Query = (), read: Read | None = None, **renamed: str
) -> Callable[[Function[Arguments, Answer]], Call[Arguments, Answer]]:
    """Return the method that reads the JSON of an answer, or its bytes; `read` replaces the reader of its type."""

    def describe(kind: Any, values: Values) -> Request[Any]:
        of_path = _path(path, values)
        wait = values.pop("wait_seconds", 0.0)
        query = [*fixed, *_query(values, renamed)]
        if kind is bytes:
            return Request(of_path, query, bytes, accept="*/*", in_project=in_project)
        return Request(of_path, query, _from_json(read or _reader_of(kind)), in_project=in_project, wait_seconds=wait)

    return lambda function: Method("send", function, describe)


def listing(
    path: str, *, in_project: bool = True, is_paged: bool = True, **renamed: str
) -> Callable[[Function[Arguments, Iterator[Item]]], ListCall[Arguments, Item]]:
    """Return the method that yields the items of a list, page after page."""

    def describe(kind: Any, values: Values) -> Listing[Any]:
        of_path = _path(path, values)
        (item,) = typing.get_args(kind)
        return Listing(of_path, _query(values, renamed), _reader_of(item), in_project, is_paged)

    return lambda function: Method("items", function, describe)


def change(
    method: HttpMethod,
    path: str,
    *,
    in_project: bool = True,
    is_repeatable: bool = True,
    query: Collection[str] = (),
    body: Callable[[Values], Values] = given,
) -> Callable[[Function[Arguments, Answer]], Call[Arguments, Answer]]:
    """Return the method that changes something. `query` names its parameters of the query, `body` makes the JSON body.

    Raises ConfigurationError, when it is called, if the body is no JSON.
    """

    def describe(kind: Any, values: Values) -> Request[Any]:
        of_path = _path(path, values)
        of_query = [(name, values.pop(name)) for name in query]
        return Request(
            of_path,
            of_query,
            _nothing if kind is type(None) else _from_json(_reader_of(kind)),
            in_project=in_project,
            method=method,
            content=json_bytes(body(values)) if values else None,
            is_repeatable=is_repeatable,
        )

    return lambda function: Method("send", function, describe)


def names_of(argument: str, values: Sequence[str]) -> list[str]:
    """Return the values of an argument. Raises TypeError for one text instead of several."""
    if isinstance(values, str):
        raise TypeError(f"{argument} takes several names, such as [{values!r}], got {values!r}")
    return list(values)


def _path(template: str, values: Values) -> str:
    """Return the path with the arguments that it names, which are taken from `values`."""
    return re.sub(r"\{(\w+)\}", lambda match: quote(str(values.pop(match[1])), safe=""), template)


def _query(values: Values, renamed: Mapping[str, str]) -> list[tuple[str, Any]]:
    """Return the parameters of a query; one that takes several values is repeated."""
    pairs = [(renamed.get(name, name), value) for name, value in values.items()]
    return [(name, each) for name, value in pairs for each in (value if isinstance(value, list) else [value])]


@functools.cache
def _reader_of(kind: Any) -> Read:
    return _READERS.get(kind) or functools.partial(parse, kind)


def _from_json(read: Read) -> Callable[[bytes], Any]:
    return lambda body: read(json.loads(body))


def _nothing(body: bytes) -> None:
    """Read the empty answer of a deletion."""
