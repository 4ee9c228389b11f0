"""Waiting for what other threads and processes do."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import httpx

Found = TypeVar("Found")


def wait_until(
    found: Callable[[], Found], seconds: float = 60.0, otherwise: Callable[[], object] = lambda: "it did not happen"
) -> Found:
    """Return the first true answer of `found`. Raises AssertionError with what `otherwise` returns after `seconds`."""
    deadline = time.monotonic() + seconds
    while not (answer := found()):
        assert time.monotonic() < deadline, otherwise()
        time.sleep(0.02)
    return answer


def wait_until_answered(
    url: str, is_running: Callable[[], bool], log: Path | None = None, seconds: float = 240.0
) -> None:
    """Wait until a GET of `url` is answered with 200; the process of the server must keep running.

    Raises AssertionError with the end of its log.
    """

    def tail() -> str:
        return "" if log is None else log.read_text(errors="replace")[-3000:]

    def is_ready() -> bool:
        assert is_running(), tail()
        try:
            return httpx.get(url, timeout=5, trust_env=False).status_code == 200
        except httpx.HTTPError:
            return False

    wait_until(is_ready, seconds, tail)
