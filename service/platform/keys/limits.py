"""Limits of each key: requests and bytes per second, as token buckets of this process.

A request is admitted while its key's buckets are not empty, and charged afterwards for the bytes it had: a single large
body passes, and the next request waits until it is paid.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from foreshock_service.platform.problem import ProblemError

# A key may save up this many seconds of its rate: a thousand trainers that are woken at once ask again at once.
BURST_SECONDS = 5.0


class TooManyRequests(ProblemError):
    """A key beyond its limit of requests, bytes or uploads; the same request succeeds after Retry-After."""

    status = 429
    problem_type = "too-many-requests"


@dataclass(slots=True)
class _Buckets:
    """What is left of requests and bytes, as of `at`."""

    requests: float
    bytes: float
    at: float


class KeyLimits:
    """The buckets of every key that was used. A rate of 0 is no limit. Thread-safe."""

    def __init__(
        self,
        requests_per_second: float = 0.0,
        bytes_per_second: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rates = (requests_per_second or math.inf, bytes_per_second or math.inf)
        self._clock = clock
        self._lock = threading.Lock()
        self._keys: dict[str, _Buckets] = {}

    def admit(self, key_id: str) -> None:
        """Count a request of the key; raises TooManyRequests with the seconds until the next one is admitted."""
        with self._lock:
            buckets = self._refilled(key_id)
            for name, left, rate, least in (
                ("requests", buckets.requests, self._rates[0], 1.0),
                ("bytes", buckets.bytes, self._rates[1], 0.0),
            ):
                if left < least:
                    seconds = max(1, math.ceil((least - left) / rate))
                    raise TooManyRequests(
                        f"this key is limited to {rate:,.0f} {name} per second: try again in {seconds} s "
                        f"(FORESHOCK_KEY_{name.upper()}_PER_SECOND of the service)",
                        headers={"Retry-After": str(seconds)},
                    )
            buckets.requests -= 1.0

    def charge(self, key_id: str, size: int) -> None:
        """Charge the bytes of a body to its key."""
        with self._lock:
            self._refilled(key_id).bytes -= size

    def _refilled(self, key_id: str) -> _Buckets:
        now = self._clock()
        # At least one request, so that a rate below one in five seconds admits any.
        most_requests, most_bytes = max(1.0, self._rates[0] * BURST_SECONDS), self._rates[1] * BURST_SECONDS
        buckets = self._keys.setdefault(key_id, _Buckets(most_requests, most_bytes, now))
        passed = now - buckets.at
        if passed > 0.0:
            buckets.requests = min(most_requests, buckets.requests + passed * self._rates[0])
            buckets.bytes = min(most_bytes, buckets.bytes + passed * self._rates[1])
            buckets.at = now
        return buckets
