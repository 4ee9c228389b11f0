"""The outbox: undelivered items in order, in memory while they are small and the service answers, else on disk."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from foreshock.client.counters import Counters
from foreshock.client.deliveries import Delivery
from foreshock.client.spool import Spool, SpooledEntry, SpoolFullError
from foreshock.errors import SpoolError

__all__ = ["Outbox", "OutboxEntry"]


@dataclass(slots=True, eq=False)
class OutboxEntry:
    """One delivery, either in memory (`delivery`) or on disk (`spooled`)."""

    sequence: int
    size: int
    needed: bool
    delivery: Delivery | None = None
    spooled: SpooledEntry | None = None
    server_faults: int = 0


class Outbox:
    """An ordered queue shared by two threads: the encoder appends, the sender takes from the front."""

    def __init__(self, spool: Spool, counters: Counters, *, max_memory_bytes: int, warn: Callable[[str, str], None]):
        self._spool = spool
        self._counters = counters
        self._max_memory_bytes = max_memory_bytes
        self._warn = warn
        self._lock = threading.Lock()
        self._entries: deque[OutboxEntry] = deque()
        self._memory_bytes = 0
        self._next_sequence = 1

    def __len__(self) -> int:
        return len(self._entries)

    def recover(self) -> int:
        """Put the entries that earlier processes left on disk in front; return their number."""
        with self._lock:
            try:
                left = self._spool.adopt()
            except SpoolError as error:
                self._warn("spool", f"{error}; data of earlier processes in it is not sent")
                return 0
            self._entries.extend(
                OutboxEntry(0, entry.size, needed=entry.kind in ("register", "state"), spooled=entry) for entry in left
            )
            return len(left)

    def append(self, delivery: Delivery, *, to_disk: bool) -> None:
        """Add at the end: on disk if `to_disk` or if it does not fit into memory."""
        with self._lock:
            entry = OutboxEntry(self._next_sequence, len(delivery.body), delivery.needed, delivery=delivery)
            self._next_sequence += 1
            fits = self._memory_bytes + entry.size <= self._max_memory_bytes
            written = (to_disk or not fits) and self._to_disk(entry, delivery)
            if not written:
                if not (fits or entry.needed):
                    self._counters.add(dropped_spool_full=1, dropped_bytes=entry.size)
                    return
                self._memory_bytes += entry.size
            self._entries.append(entry)

    def at(self, position: int) -> OutboxEntry | None:
        """Return the entry at `position` from the front, None if there is none."""
        with self._lock:
            return self._entries[position] if position < len(self._entries) else None

    def load(self, entry: OutboxEntry) -> Delivery | None:
        """Return the entry's delivery; a damaged entry is moved to the folder `rejected` and None returned."""
        delivery = entry.delivery
        if delivery is not None:
            return delivery
        assert entry.spooled is not None
        try:
            return self._spool.load(entry.spooled)
        except (ValueError, SpoolError) as error:
            self._warn("damaged", f"{entry.spooled.body_path} is damaged ({error}); moved to the folder `rejected`")
            self._counters.add(rejected=1)
            with self._lock:
                try:
                    self._spool.set_aside(entry.spooled)
                except SpoolError as failure:
                    self._warn("spool", str(failure))
            self._take(entry)
            return None

    def done(self, entry: OutboxEntry) -> None:
        """Remove a delivered entry."""
        with self._lock:
            if entry.spooled is not None:
                try:
                    self._spool.remove(entry.spooled)
                except SpoolError as error:
                    self._warn("spool", str(error))
        self._take(entry)

    def reject(self, entry: OutboxEntry, delivery: Delivery, problem: dict[str, object]) -> None:
        """Remove a rejected entry, keeping its bytes in the spool's folder `rejected`."""
        with self._lock:
            try:
                path = self._spool.reject(delivery, problem)
                self._warn(f"kept {path.name}", f"the rejected bytes are kept in {path}")
            except SpoolError as error:
                self._warn("spool", str(error))
        self.done(entry)

    def all_to_disk(self) -> None:
        """Write the entries in memory to disk, where they survive the end of this process."""
        with self._lock:
            for entry in self._entries:
                if entry.delivery is None:
                    continue
                if not self._to_disk(entry, entry.delivery):
                    return
                self._memory_bytes -= entry.size

    def _to_disk(self, entry: OutboxEntry, delivery: Delivery) -> bool:
        """Write an entry to disk and return True on success. The caller holds the lock."""
        try:
            entry.spooled = self._spool.write(entry.sequence, delivery)
        except SpoolFullError as error:
            self._warn(
                "spool full", f"{error}; items that do not fit into memory are dropped until the service accepts some"
            )
            return False
        except SpoolError as error:
            self._warn("spool", f"{error}; items that do not fit into memory are dropped until the service is back")
            return False
        entry.delivery = None
        self._counters.add(spooled=1, spooled_bytes=entry.size)
        return True

    def _take(self, entry: OutboxEntry) -> None:
        with self._lock:
            self._entries.remove(entry)
            if entry.spooled is None:
                self._memory_bytes -= entry.size
