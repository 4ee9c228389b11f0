"""The background of one client: bounded queue, encoder thread, outbox, spool, sender thread, and their end.

`concurrent.futures.thread` is imported for encoding at the end of the process: pyarrow then imports pandas, if it is
installed, and pandas imports this module, which Python refuses to load so late.

In a forked child the pipeline is disabled (its threads live in the parent): items logged there are counted as dropped.
"""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # noqa: F401
import contextlib
import os
import sys
import threading
import weakref
from collections.abc import Callable

from foreshock.client.checkpoint_requests import CheckpointRequests
from foreshock.client.connection import ServiceConnection
from foreshock.client.copy_memory import CopyMemory
from foreshock.client.counters import Counters
from foreshock.client.deliveries import Delivery, Registration
from foreshock.client.heartbeats import Heartbeats
from foreshock.client.log_once import LogOnce
from foreshock.client.outbox import Outbox
from foreshock.client.queue import BoundedQueue, Work
from foreshock.client.registrar import Registrar
from foreshock.client.sender import DeliverySender
from foreshock.client.settings import ClientSettings
from foreshock.client.spool import Spool, SpoolOwner
from foreshock.client.status import DeliveryStatus
from foreshock.client.uploader import Uploader
from foreshock.page_addresses import run_page_path

__all__ = ["Pipeline"]

# The rollouts of one step and the scalars of another, beside the sender's own request.
_CONNECTIONS_AHEAD = 2


class Pipeline:
    """Takes work, encodes and delivers it in the background. All methods are safe from any thread."""

    def __init__(
        self, settings: ClientSettings, project: str, counters: Counters, log: LogOnce, *, block_when_full: bool
    ) -> None:
        """Start the threads. Nothing is sent until something is put in."""
        self.registrar = Registrar(log)
        self._settings = settings
        self._counters = counters
        self._log = log
        self._block_when_full = block_when_full
        self._closed = False
        self._disabled_by_fork = False
        self._address_of: Registration | None = None
        self._queue = BoundedQueue(max_items=settings.max_queue_items, max_bytes=settings.max_queue_bytes)
        self.copy_memory = CopyMemory(settings.max_copy_memory_bytes)
        self._spool = Spool(
            settings.spool_directory,
            owner=SpoolOwner.of(project, settings.api_key),
            max_bytes=settings.max_spool_bytes,
            max_rejected_bytes=settings.max_rejected_bytes,
        )
        outbox = Outbox(self._spool, counters, max_memory_bytes=settings.max_outbox_bytes, warn=log.warning)
        self._connection, *self._connections_ahead = (
            ServiceConnection(settings.url, settings.api_key, timeout_seconds=settings.timeout_seconds)
            for _ in range(1 + _CONNECTIONS_AHEAD)
        )
        self.heartbeats = Heartbeats(self._connection, self.registrar, interval_seconds=settings.heartbeat_seconds)
        self.checkpoint_requests = CheckpointRequests(self._connection, self.registrar)
        self._uploader = Uploader(
            DeliverySender(self._connection, self.registrar),
            [DeliverySender(connection, self.registrar) for connection in self._connections_ahead],
            self._queue,
            outbox,
            counters,
            log,
            heartbeats=self.heartbeats,
            before_encoding=lambda: self.copy_memory.prepare(settings.copy_memory_bytes),
            after_delivery=self._after_delivery,
        )
        _open_pipelines.add(self)
        self._uploader.start()

    def reserve(self, what: str, size: int, *, needed: bool = False) -> bool:
        """Reserve room for an item of `size` bytes; without room, count it as dropped and return False.

        `needed` items are small and others depend on them: they always fit.
        """
        if self._disabled_by_fork or self._closed:
            self._counters.add(dropped_closed=1, dropped_bytes=size)
            self._log.warning("closed", f"{what} is dropped: the client was closed, or its process forked")
            return False
        wait = threading.TIMEOUT_MAX if self._block_when_full else 0.0
        if self._queue.reserve(size, needed=needed, wait_seconds=wait):
            return True
        self._counters.add(dropped_queue_full=1, dropped_bytes=size)
        self._log.warning(
            "queue full", f"{what} is dropped: the queue is full, encoding is slower than logging; see client.counters"
        )
        return False

    def print_address_of(self, registration: Registration) -> None:
        """Print the address of the run's page once, to stderr, when the run is registered."""
        self._address_of = registration

    def cancel(self, size: int) -> None:
        """Give back room that was reserved and is not used."""
        self._queue.cancel(size)

    def put(self, work: Work) -> None:
        """Add work whose `size` was reserved."""
        self._counters.add(accepted=1)
        self._queue.put(work)

    def put_later(self, what: str, make: Callable[[], Delivery]) -> None:
        """Run `make` in a thread of its own and add the delivery; its room (size 0) was reserved.

        For slow work, such as reading gigabytes of weights, that must not delay the encoding of rollouts.
        """
        threading.Thread(target=self._make_and_put, args=(what, make), name="foreshock-digest", daemon=True).start()

    def flush(self, timeout_seconds: float) -> DeliveryStatus:
        """Wait until everything is delivered, rejected or dropped, or until the timeout; return what is missing."""
        if self._disabled_by_fork:
            return self._status_after_fork()
        return self._uploader.flush(timeout_seconds)

    def close(self, timeout_seconds: float | None = None) -> DeliveryStatus:
        """Deliver until the timeout (default: `exit_seconds`), leave the rest on disk, stop; return what is missing.

        Prints what is missing, if anything is. Never raises.
        """
        if self._disabled_by_fork:
            return self._status_after_fork()
        if self._closed:
            return self._uploader.status()
        self._closed = True
        try:
            self._uploader.stop(self._settings.exit_seconds if timeout_seconds is None else timeout_seconds)
            self._spool.close()
            for connection in (self._connection, *self._connections_ahead):
                connection.close()
            self.copy_memory.clear()
        except Exception as error:
            self._counters.add(internal_errors=1)
            self._log.exception("close", "closing the client failed", error)
        _open_pipelines.discard(self)
        status = self._uploader.status()
        if not status.complete:
            self._print(status)
        return status

    def _status_after_fork(self) -> DeliveryStatus:
        return DeliveryStatus(dropped=self._counters.dropped_closed, reason="the client belongs to the parent process")

    def _print(self, status: DeliveryStatus) -> None:
        lines = [f"foreshock: {status}"]
        kept = min(self._uploader.on_disk, status.undelivered)
        if kept:
            lines.append(f"  {kept} undelivered items are kept in {self._spool.directory}; the next client sends them")
        if status.undelivered > kept:
            lines.append(
                f"  {status.undelivered - kept} could not be written to {self._spool.directory} and end with this "
                "process; set FORESHOCK_SPOOL_DIRECTORY to a folder that can be written and has room"
            )
        if status.rejected:
            lines.append(f"  the rejected items are in {self._spool.directory / 'rejected'}, each with the reason")
        with contextlib.suppress(OSError, ValueError):
            # Closed at the end of some processes.
            print("\n".join(lines), file=sys.stderr)

    def _after_delivery(self, delivery: Delivery) -> None:
        wanted = self._address_of
        if wanted is not None and self.registrar.run_id(wanted) is not None:
            self._address_of = None
            with contextlib.suppress(OSError, ValueError):
                address = self._settings.url.rstrip("/") + run_page_path(wanted.run["project"], wanted.run["key"])
                print(f"foreshock: {address}", file=sys.stderr, flush=True)
        self.checkpoint_requests.after_delivery(delivery)

    def _make_and_put(self, what: str, make: Callable[[], Delivery]) -> None:
        try:
            delivery = make()
        except Exception as error:
            self._queue.cancel(0)
            self._counters.add(invalid=1)
            self._log.warning(f"invalid {what}", f"{what} is not announced: {error}")
        else:
            self.put(Work(what, 0, lambda: delivery))

    def _disable_after_fork(self) -> None:
        self._disabled_by_fork = True
        self._counters.replace_lock()
        self._spool.close_inherited_locks()


_open_pipelines: weakref.WeakSet[Pipeline] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for pipeline in list(_open_pipelines):
        pipeline.close()


def _disable_all_after_fork() -> None:
    for pipeline in list(_open_pipelines):
        pipeline._disable_after_fork()


os.register_at_fork(after_in_child=_disable_all_after_fork)
