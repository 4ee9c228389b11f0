"""What happened to what the trainer logged: numbers that only grow."""

from __future__ import annotations

import threading
from dataclasses import dataclass, fields, replace

__all__ = ["Counters", "CountersSnapshot"]


@dataclass(frozen=True, slots=True)
class CountersSnapshot:
    """Numbers since the client was made. An item is one call: a shard, a set of scalars, a checkpoint, …"""

    accepted: int = 0
    """Items taken from the trainer."""
    delivered: int = 0
    """Items that the service confirmed, those recovered from an earlier process included."""
    delivered_bytes: int = 0
    duplicates: int = 0
    """Delivered items that the service had already."""
    spooled: int = 0
    """Items written to disk because the service was away or slow."""
    spooled_bytes: int = 0
    recovered: int = 0
    """Items found on disk from an earlier process."""
    rejected: int = 0
    """Items that the service refused for good; their bytes are kept in the folder `rejected`."""
    invalid: int = 0
    """Calls whose arguments made no sense; nothing was sent."""
    dropped_queue_full: int = 0
    """Items lost because the trainer logged faster than could be encoded."""
    dropped_spool_full: int = 0
    """Items lost because the disk, or the bound set for it, was full."""
    dropped_closed: int = 0
    """Items lost because the client was closed, or belongs to the process before a fork."""
    dropped_bytes: int = 0
    """Bytes of all dropped items, before encoding where they were never encoded."""
    failed_requests: int = 0
    """Requests without a final answer: no connection, a timeout, 5xx, 429."""
    internal_errors: int = 0
    """Faults of the client itself; each kind is logged once."""

    @property
    def dropped(self) -> int:
        """Items lost, for whatever reason."""
        return self.dropped_queue_full + self.dropped_spool_full + self.dropped_closed


class Counters:
    """Counters that several threads add to. Read them as attributes, or all at one moment with `snapshot()`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._now = CountersSnapshot()

    def add(self, **amounts: int) -> None:
        """Add to the counters named."""
        with self._lock:
            self._now = replace(
                self._now, **{name: getattr(self._now, name) + amount for name, amount in amounts.items()}
            )

    def forget_locks(self) -> None:
        """In a forked child: a lock that another thread held is nobody's there, and would be waited for for ever."""
        self._lock = threading.Lock()

    def snapshot(self) -> CountersSnapshot:
        """All counters at one moment."""
        return self._now

    def __getattr__(self, name: str) -> int:
        if name.startswith("_"):
            raise AttributeError(name)
        value: int = getattr(self._now, name)
        return value

    def __repr__(self) -> str:
        now = self._now
        shown = [f"{item.name}={getattr(now, item.name)}" for item in fields(now) if getattr(now, item.name)]
        return f"Counters({', '.join(shown)})"
