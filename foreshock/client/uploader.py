"""The two threads behind a client: one encodes what the trainer logged, one sends it.

Encoding never waits for the service: what is encoded goes to the outbox, which keeps it on disk while the service is
away or slow. Sending keeps the order. An answer decides: 2xx is delivered; no answer, 5xx, 429 and the like mean
"away", and the same bytes are sent again after a growing pause; 401 and 403 too, because an operator mends a key and
the data is still good; any other 4xx is final, and the bytes are kept apart.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable

from foreshock.client.connection import ServiceConnection
from foreshock.client.counters import Counters
from foreshock.client.deliveries import Delivery
from foreshock.client.log_once import LogOnce
from foreshock.client.outbox import Outbox, OutboxEntry
from foreshock.client.queue import BoundedQueue, Work
from foreshock.client.registrar import Registrar
from foreshock.errors import RolloutsError, ServiceError, WeightsError

__all__ = ["Uploader"]

_SHORTEST_PAUSE_SECONDS = 0.5
_LONGEST_PAUSE_SECONDS = 30.0
_RETRIED_STATUSES = frozenset({401, 403, 408, 425, 429})
_BUSY_STATUSES = frozenset({502, 503, 504})
_FAULTS_BEFORE_STEPPING_OVER = 5


class Uploader:
    """Takes work from a queue, encodes it, and delivers it in order. All methods are safe from any thread."""

    def __init__(
        self,
        connection: ServiceConnection,
        queue: BoundedQueue,
        outbox: Outbox,
        registrar: Registrar,
        counters: Counters,
        log: LogOnce,
        *,
        after_delivery: Callable[[Delivery], None] | None = None,
    ) -> None:
        self._connection = connection
        self._queue = queue
        self._outbox = outbox
        self._registrar = registrar
        self._counters = counters
        self._log = log
        self._after_delivery = after_delivery
        self._changed = threading.Condition()
        self._stopping = False
        self._failures = 0
        self._refusals = 0
        self._next_try = 0.0
        self._encoder = threading.Thread(target=self._encode_all, name="foreshock-encoder", daemon=True)
        self._sender = threading.Thread(target=self._send_all, name="foreshock-sender", daemon=True)
        self._pid = os.getpid()

    def start(self) -> None:
        """Take up what earlier processes left, and start both threads."""
        recovered = self._outbox.recover()
        if recovered:
            self._counters.add(recovered=recovered)
        self._encoder.start()
        self._sender.start()

    @property
    def idle(self) -> bool:
        """Whether everything logged so far has been delivered, rejected or dropped."""
        return self._queue.empty and not len(self._outbox)

    def flush(self, timeout_seconds: float) -> bool:
        """Wait until idle, trying the service at once; whether that was reached in time."""
        return self._wait(lambda: self.idle, timeout_seconds)

    def stop(self, timeout_seconds: float) -> None:
        """Deliver what can be delivered in time, put the rest on disk, end the threads."""
        tries = self._refusals
        deadline = time.monotonic() + timeout_seconds
        self._wait(
            lambda: (
                self.idle
                # The service was tried since and is away: waiting longer helps nobody, the disk keeps it.
                or (self._queue.empty and self._refusals > tries)
            ),
            timeout_seconds,
        )
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._queue.close()
        # The encoder ends when the queue is empty: what is still there is encoded and put on disk.
        self._encoder.join(max(1.0, deadline - time.monotonic()))
        self._connection.interrupt()
        self._sender.join(5.0)
        self._outbox.all_to_disk()

    def _wait(self, reached: Callable[[], bool], timeout_seconds: float) -> bool:
        deadline = time.monotonic() + timeout_seconds
        with self._changed:
            self._next_try = 0.0
            self._changed.notify_all()
            while not reached():
                left = deadline - time.monotonic()
                if left <= 0 or self._pid != os.getpid():
                    return False
                self._changed.wait(min(left, 0.2))
            return True

    def _encode_all(self) -> None:
        while (work := self._queue.get()) is not None:
            try:
                self._encode(work)
            except Exception as error:
                self._counters.add(internal_errors=1)
                self._log.exception(f"encoding {type(error).__name__}", f"{work.what} could not be encoded", error)
            finally:
                self._queue.release(work)
            with self._changed:
                self._changed.notify_all()

    def _encode(self, work: Work) -> None:
        try:
            delivery = work.make()
        except (RolloutsError, WeightsError) as error:
            self._counters.add(invalid=1)
            self._log.warning(f"invalid {type(error).__name__}", f"{work.what} is not sent: {error}")
            return
        self._outbox.append(delivery, to_disk=self._failures > 0 or self._stopping)

    def _send_all(self) -> None:
        while True:
            entry = self._next_entry()
            if entry is None:
                return
            try:
                self._send(entry)
            except Exception as error:
                self._counters.add(internal_errors=1)
                self._log.exception(f"sending {type(error).__name__}", "the sender failed, and goes on", error)
                self._pause(None)
            with self._changed:
                self._changed.notify_all()

    def _next_entry(self) -> OutboxEntry | None:
        """The entry to send now, once there is one and it is time; None at the end."""
        with self._changed:
            while True:
                if self._stopping:
                    return None
                wait = self._next_try - time.monotonic()
                entry = self._outbox.at(0)
                if entry is not None and wait <= 0:
                    return entry
                self._changed.wait(wait if entry is not None else None)

    def _send(self, entry: OutboxEntry) -> bool:
        """Try one entry; whether it is off our hands."""
        delivery = self._outbox.load(entry)
        if delivery is None:
            return True
        try:
            response = self._registrar.send(self._connection, delivery)
        except ServiceError as error:
            return self._failed(entry, delivery, error)
        self._is_back()
        duplicate = response is not None and _says_duplicate(response.content)
        self._counters.add(delivered=1, delivered_bytes=entry.size, duplicates=int(duplicate))
        self._outbox.done(entry)
        if self._after_delivery is not None and not self._stopping:
            self._after_delivery(delivery)
        return True

    def _failed(self, entry: OutboxEntry, delivery: Delivery, error: ServiceError) -> bool:
        status = error.status
        if status is not None and 400 <= status < 500 and status not in _RETRIED_STATUSES:
            self._reject(entry, delivery, error)
            return True
        self._counters.add(failed_requests=1)
        if self._stopping:
            return False
        if status is not None and status >= 500 and status not in _BUSY_STATUSES:
            entry.server_faults += 1
            if entry.server_faults >= _FAULTS_BEFORE_STEPPING_OVER and self._stepped_over(entry):
                self._reject(entry, delivery, error)
                return True
        if status in (401, 403):
            self._log.warning("key", f"the service refuses the API key; all is kept until it is right: {error}")
        else:
            self._log.warning("away", f"{error}; what is logged is kept and sent later")
        self._pause(error)
        self._outbox.all_to_disk()
        return False

    def _stepped_over(self, entry: OutboxEntry) -> bool:
        """Whether the service takes what comes after an entry that it fails on time and again."""
        after = self._outbox.at(1)
        if after is None or self._outbox.at(0) is not entry or entry.needed:
            return False
        delivery = self._outbox.load(after)
        if delivery is None:
            return False
        try:
            self._registrar.send(self._connection, delivery)
        except ServiceError:
            return False
        self._counters.add(delivered=1, delivered_bytes=after.size)
        self._outbox.done(after)
        return True

    def _is_back(self) -> None:
        if self._failures:
            self._log.info("the service is back; sending what was kept")
            self._log.forget("away")
        self._failures = 0

    def _reject(self, entry: OutboxEntry, delivery: Delivery, error: ServiceError) -> None:
        self._is_back()
        self._counters.add(rejected=1)
        key = f"rejected {delivery.kind} {error.status}"
        self._log.warning(key, f"the service refused {delivery.describe()}: {error}")
        self._outbox.reject(entry, delivery, {"status": error.status, **error.problem})

    def _pause(self, error: ServiceError | None) -> None:
        """Wait longer after each failure, with jitter, and as long as the service asks."""
        self._failures += 1
        pause = min(_LONGEST_PAUSE_SECONDS, _SHORTEST_PAUSE_SECONDS * 2 ** min(self._failures - 1, 10))
        pause *= random.uniform(0.75, 1.25)
        if error is not None and isinstance(asked := error.problem.get("retry_after"), int):
            pause = max(pause, min(asked, 60))
        with self._changed:
            self._refusals += 1
            self._next_try = time.monotonic() + pause


def _says_duplicate(body: bytes) -> bool:
    # A glance, not a parse: the field is for people who read the counters.
    return len(body) < 4096 and b'"duplicate"' in body
