"""Forged cursors that can be decoded, to every list of the API."""

from __future__ import annotations

import base64
import json
import random
from typing import Any

from benchmarks.bad_input.answers import Tally
from benchmarks.bad_input.scene import Scene
from benchmarks.bad_input.sending import send_all

# The shapes that lists have, most of the time, so that the parts come to the database.
_SHAPES: tuple[tuple[type, ...], ...] = (
    (int, str), (int, str), (int, str), (int,), (int, int), (int, str, int, str), (str,),
)  # fmt: skip
_INTEGERS = (0, 1, -1, 2**31, 2**53, 2**63 - 1, 1 - 2**63, -(2**63), 2**63, -(2**63) - 1, 2**64, 10**400)
_TEXTS = (
    "", "a", "𝕏" * 60, "\x00", "a\x00b", "\ud800", "\udfff\ud800", "𝕏", "%", "_", "\\", "'; DROP TABLE runs;--",
    "run_" + "0" * 26, "x" * 500,
    "\uffff", "\x1b", "{}",
)  # fmt: skip
_OTHERS: tuple[Any, ...] = (None, True, 1.5, 1e308, float("nan"), [], [[1]], {}, {"a": 1})


def send_cursors(scene: Scene, document: dict[str, Any], count: int, seed: int) -> Tally:
    """Send `count` forged cursors; the same seed gives the same ones."""
    lists = [
        (path, operations["get"])
        for path, operations in document["paths"].items()
        if any(each["name"] == "cursor" for each in operations.get("get", {}).get("parameters", ()))
    ]

    def request(number: int) -> tuple[str, str, dict[str, Any]]:
        source = random.Random(f"{seed}/{number}")
        path, operation = lists[number % len(lists)]
        return path, f"{path.format(run=scene.run)}?cursor={forged_cursor(source)}", operation["responses"]

    return send_all(scene, request, count, f"seed {seed}")


def forged_cursor(source: random.Random) -> str:
    """Return the base64 of a JSON list."""
    shape = source.choice(_SHAPES)
    parts: Any = [source.choice(_INTEGERS if kind is int else _TEXTS) for kind in shape]
    if source.random() < 0.15:
        parts[source.randrange(len(parts))] = source.choice(_OTHERS)
    if source.random() < 0.05:
        parts = source.choice((*_OTHERS, parts * 3))
    return base64.urlsafe_b64encode(json.dumps(parts).encode()).decode().rstrip("=")
