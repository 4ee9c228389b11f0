"""Answers of the service as typed records, by the annotations of the records' fields.

A field that the record does not have is ignored, and one that the answer lacks has its default: a service of the next
release may add and leave out fields.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from foreshock.json_values import number_or_nan

__all__ = ["parse"]

Record = TypeVar("Record")


def parse(kind: type[Record], value: Mapping[str, Any]) -> Record:
    """Return the record of a JSON object. In a field of type `float` null is NaN: "not estimable".

    Raises KeyError, TypeError or ValueError if the object is not of this kind.
    """
    described: Any = kind
    missing = [name for name in _required(described) if name not in value]
    if missing:
        raise KeyError(f"{kind.__name__} lacks {', '.join(missing)}")
    return kind(**{name: _value(hint, value[name]) for name, hint in _hints(described).items() if name in value})


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in _fields(kind)}


@functools.cache
def _required(kind: Any) -> tuple[str, ...]:
    return tuple(
        field.name
        for field in _fields(kind)
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    )


def _fields(kind: Any) -> tuple[dataclasses.Field[Any], ...]:
    return dataclasses.fields(kind)


def _value(hint: Any, value: Any) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is types.UnionType:
        if value is None:
            return None
        return _value(next(each for each in arguments if each is not types.NoneType), value)
    if hint is float:
        return number_or_nan(value)
    if origin is tuple:
        return tuple(_value(arguments[0], each) for each in value)
    if origin is Mapping:
        return {name: _value(arguments[1], each) for name, each in value.items()}
    if dataclasses.is_dataclass(hint):
        return parse(typing.cast(type, hint), value)
    return value
