"""Hostile addresses for every GET: forged cursors of lists, and texts that a database refuses or reads differently."""

from __future__ import annotations

import base64
import json
import random
import re
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from fastapi.routing import APIRoute

from benchmarks.bad_input.answers import Tally
from benchmarks.bad_input.scene import STEP, Request, Scene, send_all
from foreshock_service.present.pages.endpoints import ROUTERS

# Mostly the shapes of real cursors, so that their parts reach the database.
_SHAPES: tuple[tuple[type, ...], ...] = (
    (int, str), (int, str), (int, str), (int,), (int, int), (int, str, int, str), (str,),
)  # fmt: skip
_INTEGERS = (0, 1, -1, 2**31, 2**53, 2**63 - 1, 1 - 2**63, -(2**63), 2**63, -(2**63) - 1, 2**64, 10**400)
_CURSOR_TEXTS = (
    "", "a", "𝕏" * 60, "\x00", "a\x00b", "\ud800", "\udfff\ud800", "𝕏", "%", "_", "\\", "'; DROP TABLE runs;--",
    "run_" + "0" * 26, "x" * 500,
    "\uffff", "\x1b", "{}",
)  # fmt: skip
_OTHERS: tuple[Any, ...] = (None, True, 1.5, 1e308, float("nan"), [], [[1]], {}, {"a": 1})


def send_cursors(scene: Scene, document: dict[str, Any], count: int, seed: int) -> Tally:
    """Send `count` forged cursors; the same seed gives the same cursors."""
    lists = [
        (path, operations["get"])
        for path, operations in document["paths"].items()
        if any(each["name"] == "cursor" for each in operations.get("get", {}).get("parameters", ()))
    ]

    def request(number: int) -> Request:
        source = random.Random(f"{seed}/{number}")
        path, operation = lists[number % len(lists)]
        return Request(path, f"{path.format(run=scene.run)}?cursor={forged_cursor(source)}", operation["responses"])

    return send_all(scene, request, count, seed)


def forged_cursor(source: random.Random) -> str:
    """Return the base64 of a JSON list."""
    shape = source.choice(_SHAPES)
    parts: Any = [source.choice(_INTEGERS if kind is int else _CURSOR_TEXTS) for kind in shape]
    if source.random() < 0.15:
        parts[source.randrange(len(parts))] = source.choice(_OTHERS)
    if source.random() < 0.05:
        parts = source.choice((*_OTHERS, parts * 3))
    return base64.urlsafe_b64encode(json.dumps(parts).encode()).decode().rstrip("=")


# Bytes, because some are not valid text: NUL, lone surrogates, cut and overlong UTF-8.
_TEXTS = (
    b"", b"\x00", b"a\x00b", b"\xed\xa0\x80", b"\xed\xbf\xbf\xed\xa0\x80", b"\xff\xfe", b"\xc3", b"\xc0\x80",
    b"\xf4\x90\x80\x80",
    b"%", b"%%", b"_", b"\\", b"\\\\%", b"'", b'"', b"'; DROP TABLE runs;--", b"<script>", b"{{7*7}}", b"..", b"../..",
    b"\x1b[31m", b"\r\n", b" ", b"x" * 2_000, "𝕏é".encode(), b"NaN", b"-1", b"0", b"1", b"1e9", b"0x10", b"9" * 30,
    b"9" * 5_000,
    b"9223372036854775807", b"9223372036854775808", b"true", b"null", b"[]", b"open", b"running",
)  # fmt: skip
# In a path, these would give another path.
_NOT_IN_PATHS = frozenset({b"", b".."})
_PARAMETER = re.compile(r"{(\w+)(?::\w+)?}")
_REAL_IN_TEN = 6


@dataclass(frozen=True, slots=True)
class Route:
    """A GET: its path, its query parameters, and its responses in the OpenAPI document (None for a page)."""

    path: str
    query: tuple[str, ...]
    responses: dict[str, Any] | None


def send_queries(scene: Scene, document: dict[str, Any], count: int, seed: int) -> Tally:
    """Send `count` requests to pages and to the API, equally many to each route; the same seed gives the same ones."""
    routes = [
        Route(route.path, tuple(each.alias for each in route.dependant.query_params), None)
        for router in ROUTERS
        for route in router.routes
        if isinstance(route, APIRoute) and "GET" in route.methods
    ]
    for path, operations in document["paths"].items():
        if (get := operations.get("get")) is not None:
            names = (each["name"] for each in get.get("parameters", ()) if each["in"] == "query")
            routes.append(Route(path, tuple(names), get["responses"]))
    real = {
        "run": scene.run, "step": str(STEP), "shard": "0", "attempt": "1", "project": "default", "key": "a run",
        "probe": str(scene.holder.lease["job"]["probe"]), "lease": str(scene.holder.lease["lease"]),
        "sample_id": scene.sample_id,
    }  # fmt: skip

    def request(number: int) -> Request:
        route = routes[number % len(routes)]
        return Request(route.path, hostile_address(route, real, random.Random(f"{seed}/{number}")), route.responses)

    return send_all(scene, request, count, seed)


def hostile_address(route: Route, real: dict[str, str], source: random.Random) -> str:
    """Return an address of the route: real names in most places of the path, hostile texts in the others."""

    def part(found: re.Match[str]) -> str:
        name = found.group(1)
        is_real = name in real and source.randrange(10) < _REAL_IN_TEN
        return quote(real[name] if is_real else source.choice(texts), safe="")

    texts = [text for text in _TEXTS if text not in _NOT_IN_PATHS]
    path = _PARAMETER.sub(part, route.path)
    pairs = []
    for name in source.sample(route.query, source.randint(0, min(3, len(route.query)))):
        for _ in range(source.choice([1, 1, 1, 3])):
            is_forged = name == "cursor" and source.random() < 0.5
            # wait=0, so that a long poll is answered at once.
            value = b"0" if name == "wait" else forged_cursor(source) if is_forged else source.choice(_TEXTS)
            pairs.append(f"{name}={quote(value, safe='')}")
    if source.random() < 0.1:
        pairs.append(f"{quote(source.choice(_TEXTS), safe='')}={quote(source.choice(_TEXTS), safe='')}")
    return path + ("?" + "&".join(pairs) if pairs else "")
