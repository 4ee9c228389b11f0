"""Texts that a database refuses or reads otherwise, in paths and queries of every page and every GET of the API."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from fastapi.routing import APIRoute

from benchmarks.bad_input.answers import Tally
from benchmarks.bad_input.cursors import forged_cursor
from benchmarks.bad_input.scene import STEP, Scene
from benchmarks.bad_input.sending import send_all
from foreshock_service.present.pages.endpoints import ROUTERS

# Bytes, because some are no text: NUL, lone surrogates, cut and overlong UTF-8.
_TEXTS = (
    b"", b"\x00", b"a\x00b", b"\xed\xa0\x80", b"\xed\xbf\xbf\xed\xa0\x80", b"\xff\xfe", b"\xc3", b"\xc0\x80",
    b"\xf4\x90\x80\x80",
    b"%", b"%%", b"_", b"\\", b"\\\\%", b"'", b'"', b"'; DROP TABLE runs;--", b"<script>", b"{{7*7}}", b"..", b"../..",
    b"\x1b[31m", b"\r\n", b" ", b"x" * 2_000, "𝕏é".encode(), b"NaN", b"-1", b"0", b"1", b"1e9", b"0x10", b"9" * 30,
    b"9" * 5_000,
    b"9223372036854775807", b"9223372036854775808", b"true", b"null", b"[]", b"open", b"running",
)  # fmt: skip
# A path with these is another path.
_NOT_IN_PATHS = frozenset({b"", b".."})
_PARAMETER = re.compile(r"{(\w+)(?::\w+)?}")
_REAL_IN_TEN = 6


@dataclass(frozen=True, slots=True)
class Route:
    """A GET: its path, the names of its query, and its responses in the OpenAPI document; None for a page."""

    path: str
    query: tuple[str, ...]
    responses: dict[str, Any] | None


def send_queries(scene: Scene, document: dict[str, Any], count: int, seed: int) -> Tally:
    """Send `count` requests of pages and of the API, each route as often; the same seed gives the same ones."""
    routes, real = [*page_routes(), *_api_routes(document)], _real_names(scene)

    def request(number: int) -> tuple[str, str, dict[str, Any] | None]:
        route = routes[number % len(routes)]
        address = hostile_address(route, real, random.Random(f"{seed}/{number}"))
        return route.path, address, route.responses

    return send_all(scene, request, count, f"seed {seed}")


def page_routes() -> list[Route]:
    """Return every GET of the pages and their parts."""
    found = []
    for router in ROUTERS:
        for route in router.routes:
            if isinstance(route, APIRoute) and "GET" in route.methods:
                names = tuple(each.alias for each in route.dependant.query_params)
                found.append(Route(route.path, names, None))
    return found


def _api_routes(document: dict[str, Any]) -> list[Route]:
    return [
        Route(path, _query_of(get), get["responses"])
        for path, operations in document["paths"].items()
        if (get := operations.get("get")) is not None
    ]


def _query_of(operation: dict[str, Any]) -> tuple[str, ...]:
    return tuple(each["name"] for each in operation.get("parameters", ()) if each["in"] == "query")


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
            # A long poll is answered at once.
            value = b"0" if name == "wait" else forged_cursor(source) if is_forged else source.choice(_TEXTS)
            pairs.append(f"{name}={quote(value, safe='')}")
    if source.random() < 0.1:
        pairs.append(f"{quote(source.choice(_TEXTS), safe='')}={quote(source.choice(_TEXTS), safe='')}")
    return path + ("?" + "&".join(pairs) if pairs else "")


def _real_names(scene: Scene) -> dict[str, str]:
    return {
        "run": scene.run, "step": str(STEP), "shard": "0", "attempt": "1", "project": "default", "key": "a run",
        "probe": str(scene.holder.lease["job"]["probe"]), "lease": str(scene.holder.lease["lease"]),
        "sample_id": scene.sample_id,
    }  # fmt: skip
