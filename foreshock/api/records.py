"""What every answer is made of: `Record`, numbers that may be not estimable, and the parser of JSON.

Client and service may be one release apart, so `parse` ignores a field that the record does not have, and gives one
that the answer lacks its default. A new field of a record therefore needs a default.
"""

import dataclasses
import functools
import math
import types
import typing
from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar

from foreshock.json_values import Measured as Measured
from foreshock.json_values import json_value, number_or_nan

NAN = math.nan
Kind = TypeVar("Kind")


@typing.dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(dataclasses.field,))
@dataclasses.dataclass(frozen=True)
class Record:
    """An answer, or a part of one: each subclass is a frozen dataclass.

    A text in the type of a field, `Annotated[int, "response tokens"]`, is its description in the OpenAPI document.
    """

    # A default is for older answers: this service always sends the field.
    __pydantic_config__: ClassVar[Mapping[str, Any]] = {"json_schema_serialization_defaults_required": True}

    def __init_subclass__(cls, *, kw_only: bool = True) -> None:
        dataclasses.dataclass(frozen=True, kw_only=kw_only)(cls)

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: Any, handler: Any) -> dict[str, Any]:
        return describe_fields(cls, handler(core_schema), handler)


def describe_fields(kind: type, schema: dict[str, Any], handler: Any) -> dict[str, Any]:
    """Add the texts in the types of a dataclass's fields to its JSON schema, as their descriptions."""
    fields = handler.resolve_ref_schema(schema)["properties"]
    for name, hint in typing.get_type_hints(kind, include_extras=True).items():
        for text in getattr(hint, "__metadata__", ()):
            if name in fields and isinstance(text, str):
                fields[name].setdefault("description", text)
    return schema


def parse(kind: type[Kind], value: Mapping[str, Any]) -> Kind:
    """Return the record of a JSON object. In a field of type `float` null is NaN: "not estimable".

    Raises KeyError, TypeError or ValueError if the object is not of this kind.
    """
    fields = _fields(kind)
    missing = [name for name, (_, is_required) in fields.items() if is_required and name not in value]
    if missing:
        raise KeyError(f"{kind.__name__} lacks {', '.join(missing)}")
    return kind(**{name: _value(hint, value[name]) for name, (hint, _) in fields.items() if name in value})


def to_json(record: Any) -> dict[str, Any]:
    """Return the JSON object of a record, as it is served and stored."""
    values: dict[str, Any] = json_value(record)
    return values


def from_attributes(kind: type[Kind], source: object, /, **given: Any) -> Kind:
    """Return the record of an object that has its fields as attributes, such as a row, except those that are given.

    JSON in an attribute becomes the record, tuple or mapping that the field is.
    """
    read = {name: _value(hint, getattr(source, name)) for name, (hint, _) in _fields(kind).items() if name not in given}
    return kind(**read, **given)


def _fields(kind: Any) -> dict[str, tuple[Any, bool]]:
    # A cached function takes hashable arguments only, which a type checker does not see in type[Kind].
    return _known_fields(kind)


@functools.cache
def _known_fields(kind: Any) -> dict[str, tuple[Any, bool]]:
    """Return the type of each field, and whether an answer needs it."""
    hints = typing.get_type_hints(kind)
    return {
        field.name: (
            hints[field.name],
            field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING,
        )
        for field in dataclasses.fields(kind)
    }


def _value(hint: Any, value: Any) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        kinds = [each for each in arguments if each is not types.NoneType]
        records = [each for each in kinds if dataclasses.is_dataclass(each)]
        if len(kinds) > 1 and records and isinstance(value, Mapping):
            # Of several records it is the first one of which it has what is required.
            required = ((each, {name for name, (_, needed) in _fields(each).items() if needed}) for each in records)
            return _value(next((each for each, names in required if value.keys() >= names), records[0]), value)
        return value if value is None or len(kinds) > 1 else _value(kinds[0], value)
    if hint is float:
        return number_or_nan(value)
    if origin is tuple:
        return tuple(_value(arguments[0], each) for each in value)
    if origin is Mapping:
        return {name: _value(arguments[1], each) for name, each in value.items()}
    if dataclasses.is_dataclass(hint) and not dataclasses.is_dataclass(value):
        return parse(typing.cast(type, hint), value)
    return value
