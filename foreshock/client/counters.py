"""Counters of the client: how many items were accepted, delivered, spooled, rejected and dropped."""

from __future__ import annotations

import threading
from dataclasses import dataclass, fields, replace

__all__ = ["Counters", "CountersSnapshot"]


@dataclass(frozen=True, slots=True)
class CountersSnapshot:
    """Counts since the client was created. An item is one call: a shard, a set of scalars, a checkpoint, …"""

    accepted: int = 0
    """Items that entered the queue."""
    delivered: int = 0
    """Items that the service confirmed, including those recovered from an earlier process."""
    delivered_bytes: int = 0
    duplicates: int = 0
    """Delivered items that the service already had."""
    spooled: int = 0
    """Items written to disk because the service was unavailable or slow."""
    spooled_bytes: int = 0
    recovered: int = 0
    """Items found on disk from an earlier process."""
    rejected: int = 0
    """Items that are invalid for the service; their bytes are kept in the spool's folder `rejected`."""
    invalid: int = 0
    """Calls with invalid arguments, or that could not be encoded; nothing was sent."""
    dropped_queue_full: int = 0
    """Items dropped because the queue was full: encoding is slower than logging."""
    dropped_spool_full: int = 0
    """Items dropped because the disk was full, or `max_spool_bytes` was reached."""
    dropped_closed: int = 0
    """Items dropped because the client was closed, or belongs to the parent of a fork."""
    dropped_bytes: int = 0
    """Bytes of all dropped items: encoded, or in memory if they were never encoded."""
    failed_requests: int = 0
    """Requests that are retried: no connection, a timeout, 5xx, 429, 401, …"""
    internal_errors: int = 0
    """Unexpected exceptions in the client; each kind is logged once."""

    @property
    def dropped(self) -> int:
        """Dropped items, for any reason."""
        return self.dropped_queue_full + self.dropped_spool_full + self.dropped_closed


class Counters:
    """Thread-safe counters. Read them as attributes, or all at one moment with `snapshot()`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._now = CountersSnapshot()

    def add(self, **amounts: int) -> None:
        """Add to the named counters."""
        with self._lock:
            self._now = replace(
                self._now, **{name: getattr(self._now, name) + amount for name, amount in amounts.items()}
            )

    def replace_lock(self) -> None:
        """Replace the lock in a forked child: a lock that another thread held is never released there."""
        self._lock = threading.Lock()

    def snapshot(self) -> CountersSnapshot:
        """Return all counters at one moment."""
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
