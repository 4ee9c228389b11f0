"""What an operator does to a run while a framework trains it in this process."""

import gc
import os
from typing import Any

import httpx

from foreshock.learning_rate.feed import AdviceFeed
from tests.waiting import wait_until

_SECONDS = 120.0
# Later than any halving of a test.
_LATE_STEP = 1_000_000


CORRECTION = {"kind": "token_tis", "threshold": "1"}
"""What `halve_learning_rate` sets in mode apply: a threshold that no framework has by itself, so that it shows."""


SMALL_RATE = 1e-4
"""The updates of a tiny model at this rate are within their set point, so that only the operator lowers it."""


def halve_learning_rate(reason: str) -> None:
    """Halve the learning rate of the run of this process, set a correction, and wait until its trainer has both."""
    key = os.environ["FORESHOCK_RUN_KEY"]
    with httpx.Client(base_url=os.environ["FORESHOCK_URL"], timeout=30) as http:

        def find_run() -> Any:
            # A run is registered in the background, so its first steps may be trained before it is known.
            runs = http.get("/v1/runs").raise_for_status().json()["items"]
            return next((each["id"] for each in runs if each["key"] == key), None)

        run = wait_until(find_run, _SECONDS, lambda: f"the service does not know the run {key!r}")
        body = {"kind": "halve", "reason": reason}
        http.post(f"/v1/runs/{run}/advice/decisions", json=body).raise_for_status()
        wanted = {"lever": "correction", "kind": "set", "value": CORRECTION, "reason": reason}
        http.post(f"/v1/runs/{run}/advice/decisions", json=wanted).raise_for_status()
    # Not isinstance, which follows a weak reference to an object that is gone.
    feeds = [each for each in gc.get_objects() if type(each) is AdviceFeed]
    wait_until(
        lambda: any(
            each.advised_scale(_LATE_STEP) < 1 and each.advice and each.advice.correction.last for each in feeds
        ),
        _SECONDS,
        lambda: "the advice did not arrive",
    )
