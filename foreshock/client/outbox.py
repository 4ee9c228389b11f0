"""The outbox: undelivered items in order, in memory while they are small and the service answers, else on disk.

An item that the service refuses, or all items of a run that it refuses, can be set back until a later time. The items
behind them are sent meanwhile.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from foreshock.client.counters import Counters
from foreshock.client.deliveries import Delivery
from foreshock.client.spool import Spool, SpooledEntry, SpoolFullError
from foreshock.errors import SpoolError
from foreshock.retry import Backoff

__all__ = ["Outbox", "OutboxEntry"]

# The service decodes the rollouts of one step while it stores those of another. Later scalars of a step replace
# earlier ones, so these stay in order.
_SENT_TOGETHER: Mapping[str, int] = {"rollouts": 2, "statistics": 2, "scalars": 1}


@dataclass(slots=True)
class _SetBack:
    """The time of `time.monotonic` before which something is not sent again, and the backoff that gives the next."""

    until: float
    backoff: Backoff


@dataclass(slots=True, eq=False)
class OutboxEntry:
    """One delivery, either in memory (`delivery`) or on disk (`spooled`); `run` is its run's project and key."""

    sequence: int
    size: int
    needed: bool
    run: tuple[str, str]
    delivery: Delivery | None = None
    spooled: SpooledEntry | None = None
    set_back: _SetBack | None = field(default=None, repr=False)
    sent_now: bool = False
    """True while a thread sends it."""
    in_turn: bool = False
    """True if it failed when it was sent ahead: the sender's thread sends it when everything before it is sent."""


class Outbox:
    """An ordered queue: the encoder appends, the sender takes from the front, others take what may be sent ahead.

    Rollouts and scalars of one attempt may be under way together, up to the numbers of `_SENT_TOGETHER`. Anything else
    is sent alone.
    """

    def __init__(self, spool: Spool, counters: Counters, *, max_memory_bytes: int, warn: Callable[[str, str], None]):
        self._spool = spool
        self._counters = counters
        self._max_memory_bytes = max_memory_bytes
        self._warn = warn
        self._lock = threading.Lock()
        self._entries: deque[OutboxEntry] = deque()
        self._under_way: list[OutboxEntry] = []
        self._runs_set_back: dict[tuple[str, str], _SetBack] = {}
        self._memory_bytes = 0
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
            self._entries.extendleft(
                OutboxEntry(0, entry.size, entry.kind in ("register", "state"), entry.run, spooled=entry)
                for entry in reversed(left)
            )
            return len(left)

    def append(self, delivery: Delivery, *, to_disk: bool) -> None:
        """Add at the end: on disk if `to_disk` or if it does not fit into memory."""
        with self._lock:
            run = delivery.registration.run_identity
            entry = OutboxEntry(self._next_sequence, len(delivery.body), delivery.needed, run, delivery=delivery)
            self._next_sequence += 1
            fits = self._memory_bytes + entry.size <= self._max_memory_bytes
            written = (to_disk or not fits) and self._to_disk(entry, delivery)
            if not written:
                if not (fits or entry.needed):
                    self._counters.add(dropped_spool_full=1, dropped_bytes=entry.size)
                    return
                self._memory_bytes += entry.size
            self._entries.append(entry)

    def next_due(self, now: float) -> tuple[OutboxEntry | None, float | None]:
        """Return the first entry that can be sent now; else None, and the seconds until one is due.

        The seconds are None if it is empty, or if the first entry waits for the end of one that is sent.
        """
        with self._lock:
            return self._next_due(now)

    def take_due(self, now: float) -> OutboxEntry | None:
        """Return the first entry that can be sent now, for the calling thread alone until `release`."""
        with self._lock:
            entry, _ = self._next_due(now)
            return None if entry is None else self._taken(entry)

    def take_ahead(self, is_registered: Callable[[Delivery], bool]) -> OutboxEntry | None:
        """Return an entry to send ahead of its turn, for the calling thread alone until `release`; None without one."""
        with self._lock:
            if not self._under_way:
                return None
            # Set back entries are left out; one that waits for its turn keeps those behind it waiting.
            entry, _ = self._next_due(0.0)
            if entry is None or entry.in_turn or entry.delivery is None or not is_registered(entry.delivery):
                return None
            return self._taken(entry)

    def release(self, entry: OutboxEntry) -> None:
        """Note that the thread which took the entry no longer sends it."""
        with self._lock:
            entry.sent_now = False
            self._under_way.remove(entry)

    def all_set_back(self, now: float) -> bool:
        """Return whether nothing is under way and no entry is due."""
        with self._lock:
            return not self._under_way and self._next_due(now)[0] is None

    def set_back(self, entry: OutboxEntry, now: float, backoff: Callable[[], Backoff], *, whole_run: bool) -> None:
        """Send the entry, or every entry of its run, later: each time after a longer delay of `backoff()`."""
        with self._lock:
            known = self._runs_set_back.get(entry.run) if whole_run else entry.set_back
            known = known or _SetBack(now, backoff())
            known.until = now + known.backoff.next_delay()
            if whole_run:
                self._runs_set_back[entry.run] = known
            else:
                entry.set_back = known

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

    def _next_due(self, now: float) -> tuple[OutboxEntry | None, float | None]:
        """See `next_due`. The caller holds the lock."""
        earliest: float | None = None
        for entry in self._entries:
            if entry.sent_now:
                continue
            until = self._set_back_until(entry)
            if until <= now:
                return (entry, 0.0) if self._goes_beside(entry) else (None, None)
            earliest = until if earliest is None else min(earliest, until)
        return None, None if earliest is None else earliest - now

    def _goes_beside(self, entry: OutboxEntry) -> bool:
        """Return whether the entry may be sent beside what is under way. The caller holds the lock."""
        if not self._under_way:
            return True
        under_way = [each.delivery for each in self._under_way]
        # Entries on disk are sent alone: they wait for a service that was away.
        if entry.delivery is None or None in under_way:
            return False
        together = [entry.delivery, *(each for each in under_way if each is not None)]
        kinds = Counter(each.kind for each in together)
        return all(each.registration == entry.delivery.registration for each in together) and all(
            count <= _SENT_TOGETHER.get(kind, 0) for kind, count in kinds.items()
        )

    def _taken(self, entry: OutboxEntry) -> OutboxEntry:
        entry.sent_now = True
        self._under_way.append(entry)
        return entry

    def _set_back_until(self, entry: OutboxEntry) -> float:
        """Return when the entry may be sent. The caller holds the lock."""
        run = self._runs_set_back.get(entry.run)
        return max(0.0 if run is None else run.until, 0.0 if entry.set_back is None else entry.set_back.until)

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
