"""Values as JSON can hold them: JSON has no NaN and no infinity, so such floats become null."""

import dataclasses
import json
import math
from collections.abc import Mapping
from typing import Annotated, Any

from foreshock.errors import ConfigurationError


def finite_or_none(value: float | None) -> float | None:
    """Return `value`, or None if it is NaN or infinite."""
    return value if value is not None and math.isfinite(value) else None


class _NullIsNan:
    """Tells pydantic that a float is null in JSON if it is not finite. This package never imports pydantic."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> dict[str, Any]:
        nullable = {"type": "nullable", "schema": {"type": "float"}}
        return {
            **nullable,
            "serialization": {"type": "function-plain", "function": finite_or_none, "return_schema": nullable},
        }


Measured = Annotated[float, _NullIsNan()]
"""A number that may be not estimable: NaN in Python, null in JSON. In JSON infinity is null too."""


def number_or_nan(value: float | None) -> float:
    """Return a JSON number as float, NaN for null."""
    return math.nan if value is None else float(value)


def json_value(value: Any) -> Any:
    """Return nested mappings, records, lists and tuples as dicts and lists, with None for every non-finite float."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, float):
        return finite_or_none(value)
    if isinstance(value, Mapping):
        return {name: json_value(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_value(item) for item in value]
    if dataclasses.is_dataclass(value):
        return {field.name: json_value(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return value


def given(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that are not None."""
    return {name: value for name, value in values.items() if value is not None}


def json_bytes(arguments: Mapping[str, Any]) -> bytes:
    """Return the arguments of a call as JSON. Raises ConfigurationError if they are not JSON values."""
    try:
        return json.dumps(arguments, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigurationError(f"arguments must be JSON values with finite numbers: {error}") from error
