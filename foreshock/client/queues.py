"""The two queues of a client: logged items that wait to be encoded, and encoded ones that wait to be delivered.

`BoundedQueue` is in memory, between the trainer and the encoder. `Outbox` is on disk, between the encoder and the
sender: each item is written to the spool before it is sent, and deleted when the service has it.

What is written survives a kill of the process. It is synced, so that it survives a loss of power too, once the service
fails to take it, or if more than `max_memory_bytes` wait. Until then the bytes are in memory as well, so that sending
does not read them again (a step of 4 MB: 3 ms of CPU).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from foreshock.client.deliveries import Delivery
from foreshock.client.reporting import Counters
from foreshock.client.spool import Spool, SpooledEntry, SpoolFullError
from foreshock.errors import SpoolError
from foreshock.retry import Backoff

__all__ = ["BoundedQueue", "Outbox", "OutboxEntry", "Work"]


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """One logged item: `make` encodes it in the background. `size` is its size in memory, in bytes."""

    what: str
    size: int
    make: Callable[[], Delivery]


class BoundedQueue:
    """A FIFO queue. Room is reserved before arrays are copied, so that a full queue costs no copy."""

    def __init__(self, *, max_items: int, max_bytes: int) -> None:
        self._max_items = max_items
        self._max_bytes = max_bytes
        self._items: deque[Work] = deque()
        self._reserved_items = 0
        self._reserved_bytes = 0
        self._changed = threading.Condition()
        self._closed = False

    @property
    def empty(self) -> bool:
        """True if nothing is queued, being copied or being encoded."""
        return self._reserved_items == 0

    @property
    def items(self) -> int:
        """Number of items that are queued, being copied or being encoded."""
        return self._reserved_items

    def reserve(self, size: int, *, needed: bool = False, wait_seconds: float = 0.0) -> bool:
        """Reserve room for one item of `size` bytes; False if there is none after `wait_seconds`, or it is closed.

        An item larger than the bound fits into an empty queue: it could never be logged otherwise.
        """
        deadline = time.monotonic() + wait_seconds
        with self._changed:
            while not self._closed:
                fits = self._reserved_items < self._max_items and self._reserved_bytes + size <= self._max_bytes
                if needed or fits or self._reserved_items == 0:
                    self._reserved_items += 1
                    self._reserved_bytes += size
                    return True
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                self._changed.wait(min(left, 60.0))
            return False

    def put(self, work: Work) -> None:
        """Add work whose `size` was reserved."""
        with self._changed:
            self._items.append(work)
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
            while not self._items:
                # Closed, but room is still reserved: another thread is copying and will call `put`.
                if self._closed and not self._reserved_items:
                    return None
                self._changed.wait()
            return self._items.popleft()

    def close(self) -> None:
        """Accept no further work; queued work can still be taken."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


@dataclass(slots=True)
class _SetBack:
    """The time of `time.monotonic` before which something is not sent again, and the backoff that gives the next."""

    until: float
    backoff: Backoff


@dataclass(slots=True, eq=False)
class OutboxEntry:
    """One delivery, on disk (`spooled`), in memory (`delivery`) or both; `run` is its run's project and key."""

    sequence: int
    size: int
    run: tuple[str, str]
    delivery: Delivery | None = None
    spooled: SpooledEntry | None = None
    set_back: _SetBack | None = field(default=None, repr=False)


class Outbox:
    """Encoded items in order: the encoder appends, the sender takes from the front. Safe from any thread.

    An item that the service refuses, or all items of a run that it refuses, can be set back until a later time. The
    items behind them are sent meanwhile.
    """

    def __init__(self, spool: Spool, counters: Counters, *, max_memory_bytes: int, warn: Callable[[str, str], None]):
        self._spool = spool
        self._counters = counters
        self._max_memory_bytes = max_memory_bytes
        self._warn = warn
        self._lock = threading.Lock()
        self._entries: deque[OutboxEntry] = deque()
        self._runs_set_back: dict[tuple[str, str], _SetBack] = {}
        self._unsynced: dict[OutboxEntry, None] = {}
        self._unsynced_bytes = 0
        self._next_sequence = 1

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def on_disk(self) -> int:
        """Number of entries that survive the end of this process."""
        with self._lock:
            return sum(entry.spooled is not None for entry in self._entries)

    def recover(self, *, other_keys: bool = False) -> int:
        """Put the entries that earlier processes left on disk in front; return their number.

        `other_keys`: also those of processes that used another API key of the project.
        """
        with self._lock:
            try:
                left = self._spool.adopt(other_keys=other_keys)
            except SpoolError as error:
                self._warn("spool", f"{error}; data of earlier processes in it is not sent")
                return 0
            self._entries.extendleft(OutboxEntry(0, entry.size, entry.run, spooled=entry) for entry in reversed(left))
            return len(left)

    def append(self, delivery: Delivery) -> None:
        """Add at the end, on disk; in memory if the disk does not take it, or dropped if there is no room either."""
        with self._lock:
            entry = OutboxEntry(self._next_sequence, len(delivery.body), delivery.registration.run_identity)
            self._next_sequence += 1
            if not self._write(entry, delivery):
                self._sync()
                if self._unsynced_bytes + entry.size > self._max_memory_bytes and not delivery.needed:
                    self._counters.add(dropped_spool_full=1, dropped_bytes=entry.size)
                    return
            entry.delivery = delivery
            self._entries.append(entry)
            self._unsynced[entry] = None
            self._unsynced_bytes += entry.size
            if self._unsynced_bytes > self._max_memory_bytes:
                self._sync()

    def sync(self) -> None:
        """Make every entry survive the end of this process and a loss of power."""
        with self._lock:
            self._sync()

    def next_due(self, now: float) -> tuple[OutboxEntry | None, float | None]:
        """Return the first entry that can be sent now; else None, and the seconds until one is due, None if empty."""
        with self._lock:
            earliest: float | None = None
            for entry in self._entries:
                run = self._runs_set_back.get(entry.run)
                until = max(0.0 if run is None else run.until, 0.0 if entry.set_back is None else entry.set_back.until)
                if until <= now:
                    return entry, 0.0
                earliest = until if earliest is None else min(earliest, until)
            return None, None if earliest is None else earliest - now

    def set_back(self, entry: OutboxEntry, now: float, backoff: Callable[[], Backoff], *, whole_run: bool) -> None:
        """Send the entry, or every entry of its run, later: each time after a longer delay of `backoff()`."""
        with self._lock:
            before = self._runs_set_back.get(entry.run) if whole_run else entry.set_back
            later = before or _SetBack(0.0, backoff())
            later.until = now + later.backoff.next_delay()
            if whole_run:
                self._runs_set_back[entry.run] = later
            else:
                entry.set_back = later

    def try_all_now(self) -> None:
        """Make every entry due. The delays continue to grow with the next refusal."""
        with self._lock:
            for run in self._runs_set_back.values():
                run.until = 0.0
            for entry in self._entries:
                if entry.set_back is not None:
                    entry.set_back.until = 0.0

    def accepts(self, entry: OutboxEntry) -> None:
        """Note that the service accepts the entry's run."""
        with self._lock:
            self._runs_set_back.pop(entry.run, None)

    def leave_to_others(self, entry: OutboxEntry) -> bool:
        """Give back the adopted folder of a refused entry if another API key wrote it; return whether it did."""
        with self._lock:
            spooled = entry.spooled
            if spooled is None or entry.sequence or self._spool.owner.owns(spooled.folder):
                return False
            left = [each for each in self._entries if each.spooled and each.spooled.folder == spooled.folder]
            for each in left:
                self._entries.remove(each)
            self._spool.release(spooled.folder, [each.spooled for each in left if each.spooled])
            self._counters.add(recovered=-len(left))
            return True

    def load(self, entry: OutboxEntry) -> Delivery | None:
        """Return the entry's delivery; a damaged entry is moved to the folder `rejected` and None returned."""
        delivery = entry.delivery
        if delivery is not None:
            return delivery
        assert entry.spooled is not None
        try:
            return self._spool.load(entry.spooled)
        except (ValueError, SpoolError) as error:
            self._warn("damaged", f"{entry.spooled.path} is damaged ({error}); moved to the folder `rejected`")
            self._counters.add(rejected=1)
            with self._lock:
                self._try(lambda spooled: self._spool.set_aside(spooled), entry)
                self._remove(entry)
            return None

    def done(self, entry: OutboxEntry) -> None:
        """Remove a delivered entry."""
        with self._lock:
            self._try(lambda spooled: self._spool.remove(spooled), entry)
            self._remove(entry)

    def reject(self, entry: OutboxEntry, delivery: Delivery, problem: Mapping[str, object]) -> None:
        """Remove a rejected entry, keeping its bytes in the spool's folder `rejected`."""
        try:
            path = self._spool.rejected.keep(delivery, problem)
            self._warn(f"kept {path.name}", f"the rejected bytes are kept in {path}")
        except SpoolError as error:
            self._warn("spool", str(error))
        self.done(entry)

    def _write(self, entry: OutboxEntry, delivery: Delivery) -> bool:
        """Write an entry to disk and return True on success. The caller holds the lock."""
        try:
            entry.spooled = self._spool.write(entry.sequence, delivery)
        except SpoolError as error:
            full = isinstance(error, SpoolFullError)
            until = "the service accepts some" if full else "the service is back"
            self._warn(
                "spool full" if full else "spool",
                f"{error}; items that do not fit into memory are dropped until {until}",
            )
            return False
        return True

    def _sync(self) -> None:
        """Write what is in memory, and sync what is on disk. The caller holds the lock."""
        for entry in self._unsynced:
            if entry.spooled is None and entry.delivery is not None and not self._write(entry, entry.delivery):
                break
        written = [entry for entry in self._unsynced if entry.spooled is not None]
        try:
            self._spool.sync(entry.spooled for entry in written if entry.spooled is not None)
        except SpoolError as error:
            self._warn("spool", str(error))
            return
        for entry in written:
            self._forget_unsynced(entry)
            entry.delivery = None
            self._counters.add(spooled=1, spooled_bytes=entry.size)

    def _try(self, change: Callable[[SpooledEntry], None], entry: OutboxEntry) -> None:
        if entry.spooled is not None:
            try:
                change(entry.spooled)
            except SpoolError as error:
                self._warn("spool", str(error))

    def _remove(self, entry: OutboxEntry) -> None:
        self._entries.remove(entry)
        self._forget_unsynced(entry)

    def _forget_unsynced(self, entry: OutboxEntry) -> None:
        if entry in self._unsynced:
            del self._unsynced[entry]
            self._unsynced_bytes -= entry.size
