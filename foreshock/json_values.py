"""Floats as JSON can hold them: JSON has no NaN and no infinity, so they become null."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any


def finite_or_none(value: float | None) -> float | None:
    """Return `value`, or None if it is NaN or infinite."""
    return value if value is not None and math.isfinite(value) else None


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
