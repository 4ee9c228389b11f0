"""Parse JSON and TOML that come from outside: whatever is wrong with a text is a ValueError, deep nesting included.

The parsers of the standard library raise RecursionError for `[[[[…`, which few callers expect.
"""

import json
import tomllib
from collections.abc import Callable
from typing import Any


def parse_json(text: str | bytes | bytearray) -> Any:
    """Return the value of a JSON text. Raises ValueError."""
    return _guarded(json.loads, text)


def parse_toml(text: str) -> dict[str, Any]:
    """Return the tables of a TOML text. Raises ValueError, of which tomllib.TOMLDecodeError is one."""
    tables: dict[str, Any] = _guarded(tomllib.loads, text)
    return tables


def _guarded(parse: Callable[[Any], Any], text: object) -> Any:
    try:
        return parse(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
