"""The two queues of a client: logged items that wait to be encoded, and encoded ones that wait to be delivered.

`BoundedQueue` is in memory, between the trainer and the encoder. `Outbox` is on disk, between the encoder and the
sender: each item is written to the spool before it is sent, and deleted when the service has it.

What is written survives a kill of the process, and is read from there when it is sent. Once the service fails to take
an item, the sender syncs what waits, so that it survives a loss of power too.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from foreshock.client.deliveries import Delivery
from foreshock.client.reporting import Counters
from foreshock.client.spool import Item, Spool, SpoolFullError
from foreshock.errors import SpoolError
from foreshock.retry import Backoff

# Delays after a refusal that a person must correct, or for an item that the service fails on.
_FIRST_REFUSED_SECONDS = 2.0
_LONGEST_REFUSED_SECONDS = 300.0


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

    def __len__(self) -> int:
        """Return the number of items that are queued, being copied or being encoded."""
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


class Outbox:
    """Encoded items in order: the encoder appends, the sender takes from the front. Safe from any thread.

    An item that the service refuses, or all items of a run that it refuses, can be set back until a later time. The
    items behind them are sent meanwhile. Items that the disk does not take are in memory, `max_memory_bytes` at most.
    """

    def __init__(self, spool: Spool, counters: Counters, *, max_memory_bytes: int, warn: Callable[[str, str], None]):
        self._spool = spool
        self._counters = counters
        self._max_memory_bytes = max_memory_bytes
        self._warn = warn
        self._lock = threading.Lock()
        self._items: deque[Item] = deque()
        # The time before which something is not sent again, the backoff that gives the next one, and the reason.
        self._set_back: dict[Item | tuple[str, str], tuple[float, Backoff, str]] = {}
        self._appended = 0

    def __len__(self) -> int:
        return len(self._items)

    @property
    def on_disk(self) -> int:
        """Number of items that survive the end of this process."""
        with self._lock:
            return sum(item.path is not None for item in self._items)

    def recover(self, *, other_keys: bool = False) -> None:
        """Put the items that earlier processes left on disk in front.

        `other_keys`: also those of processes that used another API key of the project.
        """
        with self._lock:
            try:
                left = self._spool.adopt(other_keys=other_keys)
            except SpoolError as error:
                self._warn("spool", f"{error}; data of earlier processes in it is not sent")
                return
            self._items.extendleft(reversed(left))
            self._counters.add(recovered=len(left))

    def append(self, delivery: Delivery) -> None:
        """Add at the end, on disk; in memory if the disk does not take it, or dropped if there is no room either."""
        with self._lock:
            self._appended += 1
            item = Item(len(delivery.body), delivery.registration.run_identity, self._appended, delivery=delivery)
            if not self._write(item) and not delivery.needed:
                in_memory = sum(each.size for each in self._items if each.delivery is not None)
                if in_memory + item.size > self._max_memory_bytes:
                    self._counters.add(dropped_spool_full=1, dropped_bytes=item.size)
                    return
            self._items.append(item)
            if self._spool.size > self._max_memory_bytes:
                # The service is slower than the trainer.
                self._note_spooled(item)

    def sync(self) -> None:
        """Write what is in memory only, and make everything on disk survive a loss of power. Called by the sender."""
        with self._lock:
            for item in self._items:
                if item.delivery is not None and not self._write(item):
                    break
            waiting = [item for item in self._items if item.path is not None and not item.is_synced]
        if not waiting:
            return
        # Not under the lock: a disk may take milliseconds for each.
        try:
            self._spool.sync(waiting)
        except SpoolError as error:
            self._warn("spool", str(error))
            return
        with self._lock:
            for item in waiting:
                self._note_spooled(item)
                item.is_synced = True

    def due(self, now: float, most: int) -> list[Item]:
        """Return the first `most` items that can be sent now, in order."""
        with self._lock:
            return list(itertools.islice((item for item in self._items if self._due_at(item) <= now), most))

    def next_due(self) -> float:
        """Return the `time.monotonic` at which the first item can be sent, 0 for at once; infinity if it is empty."""
        with self._lock:
            earliest = math.inf
            for item in self._items:
                earliest = min(earliest, self._due_at(item))
                if not earliest:
                    break
            return earliest

    def _due_at(self, item: Item) -> float:
        return max((self._set_back[key][0] for key in (item, item.run) if key in self._set_back), default=0.0)

    def set_back(self, item: Item, reason: str, *, whole_run: bool) -> None:
        """Send the item, or every item of its run, later: each time after a longer delay."""
        key = item.run if whole_run else item
        with self._lock:
            known = self._set_back.pop(key, None)
            backoff = Backoff(_FIRST_REFUSED_SECONDS, _LONGEST_REFUSED_SECONDS) if known is None else known[1]
            self._set_back[key] = time.monotonic() + backoff.next_delay(), backoff, reason

    @property
    def reason(self) -> str | None:
        """The newest reason for which something waits, None if nothing was refused that waits."""
        with self._lock:
            return next((reason for *_, reason in reversed(self._set_back.values())), None)

    def try_all_now(self) -> None:
        """Make every item due. The delays continue to grow with the next refusal."""
        with self._lock:
            self._set_back = {key: (0.0, backoff, reason) for key, (_, backoff, reason) in self._set_back.items()}

    def accepts(self, item: Item) -> None:
        """Note that the service accepts the item's run."""
        with self._lock:
            self._set_back.pop(item.run, None)

    def load(self, item: Item) -> Delivery | None:
        """Return the item's delivery; a damaged item is set aside and None returned."""
        if item.delivery is not None:
            return item.delivery
        assert item.path is not None
        try:
            return self._spool.load(item.path)
        except (ValueError, SpoolError) as error:
            self.reject(item, f"{item.path} is damaged ({error})")
            return None

    def done(self, item: Item) -> None:
        """Remove an item that was delivered."""
        with self._lock:
            try:
                self._spool.remove(item)
            except SpoolError as error:
                self._warn("spool", str(error))
            self._forget(item)

    def reject(self, item: Item, reason: str) -> None:
        """Set an item aside, and log its file and the reason; it is tried again later if the disk does not take it."""
        try:
            with self._lock:
                path = self._spool.set_aside(item)
                self._forget(item)
        except SpoolError as error:
            self._warn("rejected", f"{reason}; {error}: the item stays undelivered, and is tried again later")
            self.set_back(item, str(error), whole_run=False)
            return
        self._counters.add(rejected=1)
        kept = "not kept, as the setting max_rejected_bytes is reached" if path is None else f"kept as {path}"
        self._warn(f"{reason} {path}", f"{reason}; the item is {kept}")

    def _forget(self, item: Item) -> None:
        self._items.remove(item)
        self._set_back.pop(item, None)

    def _write(self, item: Item) -> bool:
        """Write an item in memory to disk; False if the disk does not take it. The caller holds the lock."""
        assert item.delivery is not None
        try:
            self._spool.write(item, item.delivery)
        except SpoolError as error:
            full = isinstance(error, SpoolFullError)
            until = "the service accepts some" if full else "the service is back"
            self._warn(
                "spool full" if full else "spool",
                f"{error}; items that do not fit into memory are dropped until {until}",
            )
            return False
        item.delivery = None
        return True

    def _note_spooled(self, item: Item) -> None:
        if item.number and item.path is not None and not item.is_spooled:
            item.is_spooled = True
            self._counters.add(spooled=1, spooled_bytes=item.size)
