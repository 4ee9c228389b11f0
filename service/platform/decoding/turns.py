"""Whose body is decoded next: that of the key which took the least decoding time of late.

One key's heavy bodies (60 M constant tokens are 5 kB, and seconds of a decoder) then delay another key's by one body at
most. While another key is active, the last free decoder is not given to a key that has one.
"""

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Generic, TypeVar

Place = TypeVar("Place")

decoding_key: ContextVar[str | None] = ContextVar("decoding_key", default=None)
"""The key of the upload that this code serves; None: the service's own work."""

decoding_seconds: ContextVar[float] = ContextVar("decoding_seconds", default=0.0)
"""The seconds that a decoder worked for this code the last time; waiting for one does not count."""

_HALF_LIFE_SECONDS = 60.0
_ACTIVE_SECONDS = 600.0


class Turns(Generic[Place]):
    """Places that are taken one at a time, in a fair order of keys. Thread-safe."""

    def __init__(self, places: Sequence[Place], clock: Callable[[], float] = time.monotonic) -> None:
        self._idle = list(places)
        self._clock = clock
        self._changed = threading.Condition()
        # The keys that wait, in the order in which they came.
        self._waiting: dict[object, str | None] = {}
        self._running: Counter[str | None] = Counter()
        # By key: seconds of decoding that halve each minute, and when they were counted.
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
                # The last one that was used: its caches are warm.
                return self._idle.pop()
            finally:
                del self._waiting[ticket]
                self._changed.notify_all()

    def give(self, place: Place, key: str | None = None, seconds: float = 0.0) -> None:
        """Give a place back that the key used for so long."""
        with self._changed:
            self._idle.append(place)
            self._running[key] -= 1
            self._used[key] = (self._recent(key) + seconds, self._clock())
            self._changed.notify_all()

    def close(self) -> None:
        """Refuse everyone who waits, and whoever comes."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _next(self) -> object | None:
        """Return who is next; None if no place is free for anyone who waits."""
        best: tuple[float, object] | None = None
        for ticket, key in self._waiting.items() if self._idle else ():
            used = self._recent(key)
            # The first of equals came first.
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
