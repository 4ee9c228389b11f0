"""Retry with exponential backoff and full jitter: the one implementation for the client, the feed, workers and service.

    retry(send, Backoff(first_seconds=0.5, longest_seconds=30), is_retryable=is_unavailable, wait=stopped.wait)

`Backoff` alone gives the delays, for loops that schedule their next attempt themselves. The delay before retry n is
uniform in [0, min(longest, first · 2ⁿ)] ("full jitter": clients that failed together do not come back together). A
`Retry-After` of the service is a lower bound: the jittered delay is added to it.
"""

import itertools
import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

Result = TypeVar("Result")

Wait = Callable[[float], bool]
"""Wait for a number of seconds; True if interrupted in order to stop. `threading.Event.wait` of a stop event is one."""

LONGEST_RETRY_AFTER_SECONDS = 60.0
"""Cap on Retry-After: a wrong header must not stop delivery for hours."""

_POLL_SECONDS = 0.2


@dataclass(slots=True)
class Backoff:
    """The delays between attempts of one call; call `reset` after a success. Not thread-safe."""

    first_seconds: float
    longest_seconds: float
    failures: int = 0
    """Failures since the last success."""
    uniform: Callable[[float, float], float] = random.uniform

    def __post_init__(self) -> None:
        if not 0.0 < self.first_seconds <= self.longest_seconds:
            raise ValueError(
                "backoff must satisfy 0 < first_seconds <= longest_seconds, "
                f"got first_seconds={self.first_seconds}, longest_seconds={self.longest_seconds}"
            )

    def next_delay(self, retry_after_seconds: float | None = None) -> float:
        """Count a failure and return the seconds to wait before the next attempt."""
        # The exponent is bounded so that a service that is away for days does not overflow a float.
        ceiling = min(self.longest_seconds, self.first_seconds * 2.0 ** min(self.failures, 60))
        self.failures += 1
        asked = min(max(retry_after_seconds or 0.0, 0.0), LONGEST_RETRY_AFTER_SECONDS)
        return asked + self.uniform(0.0, ceiling)

    def reset(self) -> None:
        """Start again at the first delay."""
        self.failures = 0


def retry(
    call: Callable[[], Result],
    backoff: Backoff,
    *,
    is_retryable: Callable[[Exception], bool],
    wait: Callable[[float], object] | None = None,
    max_attempts: int | None = None,
    deadline_seconds: float | None = None,
    on_retry: Callable[[Exception, float], None] | None = None,
) -> Result:
    """Return the result of `call`, calling it again after failures that `is_retryable` accepts.

    Raises the last error if it is not retryable, after `max_attempts` calls, if the next delay would end later than
    `deadline_seconds` after the start, or if `wait` was interrupted. `on_retry(error, delay)` is called before each
    wait. The delay is at least the error's `retry_after_seconds`, if it has one. `wait` is `time.sleep` by default.
    """
    deadline = math.inf if deadline_seconds is None else time.monotonic() + deadline_seconds
    for attempt in itertools.count(1):
        try:
            return call()
        except Exception as error:
            if attempt == max_attempts or not is_retryable(error):
                raise
            delay = backoff.next_delay(getattr(error, "retry_after_seconds", None))
            if time.monotonic() + delay > deadline:
                raise
            if on_retry is not None:
                on_retry(error, delay)
            if (wait or time.sleep)(delay):
                raise
    raise AssertionError("unreachable")


def sleep_until_stopped(stopped: Callable[[], bool]) -> Wait:
    """Return a Wait that ends early once `stopped()` is true.

    For flags set in signal handlers, in which `threading.Event.set` can deadlock. The flag is polled every 0.2 s.
    """

    def wait(seconds: float) -> bool:
        end = time.monotonic() + seconds
        while not stopped():
            left = end - time.monotonic()
            if left <= 0:
                return False
            time.sleep(min(left, _POLL_SECONDS))
        return True

    return wait
