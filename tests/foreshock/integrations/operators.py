"""What an operator does to a run while a framework trains it in this process."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from typing import Any

import httpx

from foreshock.learning_rate.feed import AdviceFeed

_SECONDS = 120.0
# Later than any halving of a test.
_LATE_STEP = 1_000_000


def halve_learning_rate(reason: str) -> None:
    """Halve the learning rate of the run of this process, and wait until its trainer has the answer."""
    key = os.environ["FORESHOCK_RUN_KEY"]
    with httpx.Client(base_url=os.environ["FORESHOCK_URL"], timeout=30) as http:

        def find_run() -> Any:
            # A run is registered in the background, so its first steps may be trained before it is known.
            runs = http.get("/v1/runs").raise_for_status().json()["items"]
            return next((each["id"] for each in runs if each["key"] == key), None)

        run = _await(find_run, f"the service does not know the run {key!r}")
        body = {"kind": "halve", "reason": reason}
        http.post(f"/v1/runs/{run}/lr-advice/decisions", json=body).raise_for_status()
    # Not isinstance, which follows a weak reference to an object that is gone.
    feeds = [each for each in gc.get_objects() if type(each) is AdviceFeed]
    _await(lambda: any(feed.advised_scale(_LATE_STEP) < 1 for feed in feeds), "the advice did not arrive")


def _await(found: Callable[[], Any], problem: str) -> Any:
    """Return the first true answer. Raises AssertionError with `problem` after two minutes."""
    deadline = time.monotonic() + _SECONDS
    while not (answer := found()):
        assert time.monotonic() < deadline, problem
        time.sleep(0.05)
    return answer
