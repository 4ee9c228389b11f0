"""Rollouts that this process stored in the last minute."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

RATE_SECONDS = 60


class IngestRate:
    """Shards and tokens by the second in which they were stored. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._begun = clock()
        self._lock = threading.Lock()
        # [second, shards, tokens], oldest first.
        self._seconds: deque[list[int]] = deque(maxlen=RATE_SECONDS + 1)

    def note(self, tokens: int) -> None:
        """Note a stored shard."""
        second = int(self._clock())
        with self._lock:
            if not self._seconds or self._seconds[-1][0] != second:
                self._seconds.append([second, 0, 0])
            self._seconds[-1][1] += 1
            self._seconds[-1][2] += tokens

    def per_second(self) -> tuple[float, float]:
        """Return (shards, tokens) per second, over the last minute or since the start of the process."""
        now = self._clock()
        with self._lock:
            newest = [each for each in self._seconds if each[0] > now - RATE_SECONDS]
        seconds = min(float(RATE_SECONDS), max(1.0, now - self._begun))
        return sum(each[1] for each in newest) / seconds, sum(each[2] for each in newest) / seconds
