"""The modes of the levers with which a run begins, and the first scale of a resumed run.

That scale may be below 1; an update at the full rate would undo the advice.
"""

import os
import time
from typing import Any

from foreshock.client.reporting import LogOnce
from foreshock.learning_rate.feed import AdviceFeed

__all__ = ["FIRST_ADVICE_SECONDS", "await_first_advice", "modes_of_environment"]

FIRST_ADVICE_SECONDS = 10.0


def modes_of_environment() -> dict[str, Any]:
    """Return the modes, and the correction to advise, that the environment asks for, as arguments of `start_run`."""
    asked = {
        "advice_mode": os.environ.get("FORESHOCK_ADVICE_MODE"),
        "correction_mode": os.environ.get("FORESHOCK_CORRECTION_MODE"),
    }
    modes = {name: "apply" if value == "apply" else None for name, value in asked.items()}
    return modes | {"correction": os.environ.get("FORESHOCK_CORRECTION") or None}


def await_first_advice(feed: AdviceFeed, log: LogOnce, seconds: float = FIRST_ADVICE_SECONDS) -> None:
    """Wait until the feed has an answer, for up to `seconds`.

    Without an answer training continues at the scale 1.0 until one arrives, and a warning says so.
    """
    deadline = time.monotonic() + seconds
    while feed.advice is None and time.monotonic() < deadline:
        time.sleep(0.05)
    if feed.advice is None:
        log.warning(
            "first advice",
            f"the service did not answer within {seconds:g} s of the resume: the learning rate is not scaled until it "
            "does. Check FORESHOCK_URL and the service.",
        )
