"""Fair turns at the decoders.

The next body is that of the key with the least recent decoding time. So one key's heavy bodies (60 M constant tokens
are 5 kB, and take seconds to decode) delay another key's body by at most one body. While another key is active, a key
that already uses a decoder does not get the last free one.
"""

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

Place = TypeVar("Place")

_HALF_LIFE_SECONDS = 60.0
_ACTIVE_SECONDS = 600.0


class Turns(Generic[Place]):
    """Places that are given out one at a time, in a fair order of keys. Thread-safe."""

    def __init__(self, places: Sequence[Place], clock: Callable[[], float] = time.monotonic) -> None:
        self._idle = list(places)
        self._clock = clock
        self._changed = threading.Condition()
        # Ticket → key of each waiting thread, in the order of arrival.
        self._waiting: dict[object, str | None] = {}
        self._running: Counter[str | None] = Counter()
        # Key → (seconds of decoding, which halve each minute; the time when they were counted).
        self._used: dict[str | None, tuple[float, float]] = {}
        self._closed = False

    def take(self, key: str | None = None) -> Place:
        """Wait for the key's turn and return a place. Raises RuntimeError once closed."""
        ticket = object()
        with self._changed:
            self._waiting[ticket] = key
            try:
                while not self._closed and self._next() is not ticket:
                    self._changed.wait()
                if self._closed:
                    raise RuntimeError("the decoders are closed")
                self._running[key] += 1
                # The most recently used place: its caches are warm.
                return self._idle.pop()
            finally:
                del self._waiting[ticket]
                self._changed.notify_all()

    def give(self, place: Place, key: str | None = None, seconds: float = 0.0) -> None:
        """Give back a place that the key used for `seconds`."""
        with self._changed:
            self._idle.append(place)
            self._running[key] -= 1
            self._used[key] = (self._recent(key) + seconds, self._clock())
            self._changed.notify_all()

    def close(self) -> None:
        """Make every waiting and later `take` raise RuntimeError."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _next(self) -> object | None:
        """Return the ticket that is next; None if no waiting key may take a place."""
        best: tuple[float, object] | None = None
        for ticket, key in self._waiting.items() if self._idle else ():
            used = self._recent(key)
            # Of equals the first one wins: it came first.
            if self._may_take(key) and (best is None or used < best[0]):
                best = (used, ticket)
        return None if best is None else best[1]

    def _may_take(self, key: str | None) -> bool:
        if key is None or len(self._idle) > 1 or not self._running[key]:
            return True
        since = self._clock() - _ACTIVE_SECONDS
        others = [at for other, (_, at) in self._used.items() if other not in (key, None)]
        return not any(at > since for at in others) and all(other in (key, None) for other in self._waiting.values())

    def _recent(self, key: str | None) -> float:
        seconds, at = self._used.get(key, (0.0, 0.0))
        return seconds * math.exp2((at - self._clock()) / _HALF_LIFE_SECONDS)
