"""Many GET requests of one key, each judged."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

from benchmarks.bad_input.answers import Tally
from benchmarks.bad_input.scene import Scene

# Of a number: the path as routes declare it, the address, and its responses in the OpenAPI document; None for a page.
Made = Callable[[int], tuple[str, str, dict[str, Any] | None]]


def send_all(scene: Scene, made: Made, count: int, name: str, threads: int = 4) -> Tally:
    """Send what `made` returns for each number, with the key of the scope `admin`."""
    tally = Tally()

    def send(number: int) -> tuple[str, str, dict[str, Any] | None, httpx.Response | httpx.HTTPError]:
        path, address, responses = made(number)
        try:
            return path, address, responses, http.get(address)
        except httpx.HTTPError as error:
            return path, address, responses, error

    with (
        httpx.Client(base_url=scene.url, headers=scene.headers("admin"), timeout=120) as http,
        ThreadPoolExecutor(threads) as pool,
    ):
        for number, (path, address, responses, answer) in enumerate(pool.map(send, range(count))):
            example = f"{name}, number {number}, GET {address[:300]}"
            if isinstance(answer, httpx.HTTPError):
                tally.note(f"GET {path}: no answer", f"{example}: {answer!r}")
            elif responses is None:
                tally.judge_page(path, answer.status_code, answer.headers, answer.content, example)
            else:
                tally.judge(("GET", path), responses, answer.status_code, answer.headers, answer.content, example)
    return tally
