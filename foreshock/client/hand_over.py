"""The hand-over from the trainer's threads to the client's: captured items that are not yet encoded, bounded in memory.

Room is reserved before arrays are copied, so that a full hand-over costs no copy.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from foreshock.client.deliveries import Delivery

Make = Callable[[], Delivery]
"""A function that encodes an item."""


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """One captured item: `make` encodes it in the background. `size` is its size in memory, in bytes."""

    what: str
    size: int
    make: Make
    is_slow: bool = False
    """True if `make` reads gigabytes: it must not delay the items behind it."""


class HandOver:
    """A bounded FIFO queue of work."""

    def __init__(self, *, max_items: int, max_bytes: int) -> None:
        self._max_items = max_items
        self._max_bytes = max_bytes
        self._works: deque[Work] = deque()
        self._reserved_items = 0
        self._reserved_bytes = 0
        self._changed = threading.Condition()
        self._closed = False

    def __len__(self) -> int:
        """Return the number of items that are waiting, being copied or being encoded."""
        return self._reserved_items

    def reserve(self, size: int, *, needed: bool = False, block: bool = False) -> bool:
        """Reserve room for one item of `size` bytes; False if there is none, or it is closed. `block`: wait for room.

        An item larger than the bound fits if it is alone: otherwise it could never be logged.
        """
        with self._changed:
            while not self._closed:
                fits = self._reserved_items < self._max_items and self._reserved_bytes + size <= self._max_bytes
                if needed or fits or self._reserved_items == 0:
                    self._reserved_items += 1
                    self._reserved_bytes += size
                    return True
                if not block:
                    return False
                self._changed.wait()
            return False

    def put(self, work: Work) -> None:
        """Add work whose `size` was reserved."""
        with self._changed:
            self._works.append(work)
            self._changed.notify_all()

    def release(self, size: int) -> None:
        """Give back the room of encoded work, or room that was reserved and is not used."""
        with self._changed:
            self._reserved_items -= 1
            self._reserved_bytes -= size
            self._changed.notify_all()

    def get(self) -> Work | None:
        """Wait for the oldest work and return it; None if closed and empty. Its room stays reserved until `release`."""
        with self._changed:
            while not self._works:
                # Closed, but room is still reserved: another thread is copying and will call `put`.
                if self._closed and not self._reserved_items:
                    return None
                self._changed.wait()
            return self._works.popleft()

    def close(self) -> None:
        """Accept no further work; waiting work can still be taken."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
