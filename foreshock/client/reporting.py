"""What the client reports: counters, the result of `flush` and `close`, and log messages that cannot flood a log."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from typing import ParamSpec

from foreshock.errors import ForeshockError

Arguments = ParamSpec("Arguments")


@dataclass(slots=True, repr=False)
class Counters:
    """Counts since the client was created. An item is one call: a shard, a set of scalars, a checkpoint, …

    Safe from any thread; `snapshot` returns all counts of one moment.
    """

    accepted: int = 0
    """Items that entered the queue."""
    delivered: int = 0
    """Items that the service confirmed, including those recovered from an earlier process."""
    delivered_bytes: int = 0
    duplicates: int = 0
    """Delivered items that the service already had."""
    spooled: int = 0
    """Items that waited on disk because the service was unavailable or slow."""
    spooled_bytes: int = 0
    recovered: int = 0
    """Items found on disk from an earlier process."""
    rejected: int = 0
    """Items that are invalid for the service; they are kept in the spool as files `.rejected`."""
    invalid: int = 0
    """Calls with invalid arguments, or that could not be encoded, and rollouts that were left out of their shard."""
    left_out: int = 0
    """Rollouts that were left out of their shard; `invalid` counts them too."""
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
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False, compare=False)

    @property
    def dropped(self) -> int:
        """Dropped items, for any reason."""
        return self.dropped_queue_full + self.dropped_spool_full + self.dropped_closed

    def add(self, **amounts: int) -> None:
        """Add to the named counters."""
        with self._lock:
            for name, amount in amounts.items():
                setattr(self, name, getattr(self, name) + amount)

    def snapshot(self) -> Counters:
        """Return a copy: all counts of one moment."""
        with self._lock:
            return replace(self)

    def replace_lock(self) -> None:
        """Replace the lock in a forked child: a lock that another thread held is never released there."""
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        counts = {each.name: getattr(self, each.name) for each in fields(self) if each.init}
        return f"Counters({', '.join(f'{name}={count}' for name, count in counts.items() if count)})"


@dataclass(frozen=True, slots=True)
class DeliveryStatus:
    """The items of a client that the service does not have. True in a condition only if it has everything.

    `undelivered` items are kept, in memory or in the spool, and are sent again; the other kinds are not.
    """

    undelivered: int = 0
    """Items that wait: the service is away, or refuses them until the configuration is corrected."""
    rejected: int = 0
    """Items that are invalid for the service; they are kept in the spool as files `.rejected`."""
    dropped: int = 0
    """Items dropped because a limit of the client was reached, or it was closed."""
    invalid: int = 0
    """Calls with invalid arguments, or that could not be encoded, and rollouts that were left out of their shard."""
    reason: str | None = None
    """Why items are not delivered now, or else were rejected, or else were invalid."""

    @property
    def counts(self) -> tuple[int, int, int, int]:
        """Undelivered, rejected, dropped and invalid items."""
        return self.undelivered, self.rejected, self.dropped, self.invalid

    @property
    def complete(self) -> bool:
        """True if the service has every item that was logged."""
        return not any(self.counts)

    def __bool__(self) -> bool:
        return self.complete

    def __str__(self) -> str:
        names = ("not delivered", "rejected", "dropped", "invalid")
        text = ", ".join(f"{count:,} {name}" for count, name in zip(self.counts, names, strict=True) if count)
        if not text:
            return "everything was delivered"
        return f"{text} ({self.reason})" if self.reason else text


class LogOnce:
    """A logger that logs one message per key."""

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(name)
        self._seen: dict[str, str] = {}

    @property
    def messages(self) -> list[str]:
        """The messages of all keys, in the order in which they were logged."""
        # A copy: the trainer's threads log while the sender's reads.
        return list(self._seen.copy().values())

    def warning(self, key: str, message: str) -> None:
        """Log `message` unless `key` was used before."""
        if key not in self._seen:
            self._seen[key] = message
            self._logger.warning("%s", message)

    def exception(self, key: str, message: str, error: BaseException) -> None:
        """Log `message` with the error's traceback unless `key` was used before."""
        if key not in self._seen:
            self._seen[key] = f"{message}: {type(error).__name__}: {error}"
            self._logger.error("%s", message, exc_info=error)

    def info(self, message: str) -> None:
        """Log `message` every time."""
        self._logger.info("%s", message)

    def forget(self, key: str) -> None:
        """Log the next message of `key` again."""
        self._seen.pop(key, None)

    @property
    def keys(self) -> frozenset[str]:
        """The keys that were used."""
        return frozenset(self._seen.copy())

    def forget_all_but(self, keys: frozenset[str]) -> None:
        """Log the next messages of all other keys again."""
        self._seen = {key: message for key, message in self._seen.items() if key in keys}


class Failures:
    """Counts every exception and logs each kind once, or raises it if `strict`."""

    def __init__(self, counters: Counters, log: LogOnce, *, strict: bool) -> None:
        self._counters = counters
        self._log = log
        self.are_raised = strict

    @contextlib.contextmanager
    def noted(self, name: str) -> Iterator[None]:
        """Note an exception of the block: of the arguments of the method `name`, or a fault in this library."""
        try:
            yield
        except Exception as error:
            if self.are_raised:
                raise
            if isinstance(error, ForeshockError | ValueError | TypeError):
                self._counters.add(invalid=1)
                text = f"{name} was called with invalid arguments, nothing is sent: {error}"
                self._log.warning(f"invalid {name}", text)
            else:
                self._counters.add(internal_errors=1)
                self._log.exception(f"failed {name} {type(error).__name__}", f"{name} failed, nothing is sent", error)


def never_raises(method: Callable[Arguments, None]) -> Callable[Arguments, None]:
    """Give the exceptions of a method to its object's `failures` instead of raising them."""

    @functools.wraps(method)
    def call(*arguments: Arguments.args, **keywords: Arguments.kwargs) -> None:
        failures: Failures = getattr(arguments[0], "failures")  # noqa: B009 - its type is not known here
        with failures.noted(method.__name__):
            method(*arguments, **keywords)

    return call
