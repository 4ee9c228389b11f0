"""Hostile JSON: valid bodies in which values, names or bytes are replaced."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

# Texts of JSON that `json.dumps` does not write.
_RAW = (
    "NaN",
    "Infinity",
    "-Infinity",
    "1e999",
    "-0",
    "1" * 400,
    "1e-999",
    '"\\ud800"',
    '"\\u0000"',
    "0x10",
    "[" * 900,
)
_VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 2**31, 2**63, -(2**63) - 1, 2**200, 1e308, -1e-308, "", " ", "\x00",
    "\x1b[31m", "../../x",
    "x" * 5_000, "𝕏", "<script>alert(1)</script>", "{{7*7}}", "%s%n", [], {}, [[]], [None] * 100, {"a": {"a": {}}},
    "NaN",
    "2026-01-01", ["x"], {"": ""},
)  # fmt: skip
_MARK = "«raw»"


def hostile_document(valid: Any, source: random.Random) -> bytes:
    """Return the JSON of `valid` with one to three changes; sometimes its bytes are damaged too."""
    document = copy.deepcopy(valid)
    raw = source.choice(_RAW) if source.random() < 0.3 else None
    for _ in range(source.randint(1, 3)):
        document = _changed(document, source, _MARK if raw is not None else copy.deepcopy(source.choice(_VALUES)))
    body = json.dumps(document, ensure_ascii=source.random() < 0.5).encode("utf-8", "surrogatepass")
    if raw is not None:
        body = body.replace(json.dumps(_MARK).encode(), raw.encode()).replace(f'"{_MARK}"'.encode(), raw.encode())
    if source.random() < 0.15:
        body = _damaged(bytearray(body), source)
    return body


def _changed(document: Any, source: random.Random, value: Any) -> Any:
    """Replace, remove, add or rename one value somewhere in the document."""
    if isinstance(document, dict) and document and source.random() < 0.85:
        name = source.choice(list(document))
        way = source.random()
        if way < 0.15:
            del document[name]
        elif way < 0.25:
            document[source.choice(["", "x" * 300, "\x00", "__class__", "extra"])] = copy.deepcopy(value)
        else:
            document[name] = _changed(document[name], source, copy.deepcopy(value))
        return document
    if isinstance(document, list) and document and source.random() < 0.7:
        way = source.random()
        if way < 0.2:
            return [copy.deepcopy(each) for _ in range(source.choice([2, 50])) for each in document]
        index = source.randrange(len(document))
        document[index] = _changed(document[index], source, value)
        return document
    return value


def _damaged(body: bytearray, source: random.Random) -> bytes:
    way = source.random()
    if way < 0.3:
        return bytes(body[: source.randint(0, len(body))])
    for _ in range(source.randint(1, 4)):
        if body:
            body[source.randrange(len(body))] = source.randrange(256)
    return bytes(body)
