"""The threads behind a client: one encodes what the trainer logged, one sends it in order, with a helper for scalars.

Encoding never waits for the service: encoded deliveries go to the outbox, which keeps them on disk while the service is
away or slow. The answer to a delivery decides what follows:

    2xx                 delivered
    ServiceUnavailable  the same bytes are sent again, with backoff
    Unauthorized        the same: an operator can correct the key, and the data is still good
    Rejected            final: the bytes are kept in the spool's folder `rejected`
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

import httpx

from foreshock.client.counters import Counters
from foreshock.client.deliveries import Delivery
from foreshock.client.log_once import LogOnce
from foreshock.client.outbox import Outbox, OutboxEntry
from foreshock.client.queue import BoundedQueue, Work
from foreshock.client.scalars_ahead import ScalarsAhead
from foreshock.client.sender import DeliverySender
from foreshock.errors import Rejected, RolloutsError, ServiceError, Unauthorized, WeightsError
from foreshock.retry import Backoff

__all__ = ["Uploader"]

_FIRST_RETRY_SECONDS = 0.5
_LONGEST_RETRY_SECONDS = 30.0
# Overload or restart; any other 5xx may be caused by the delivery itself.
_OVERLOAD_STATUSES = frozenset({502, 503, 504})
_SERVER_FAULTS_BEFORE_SKIPPING = 5


class Uploader:
    """Takes work from a queue, encodes it, and delivers it in order. All methods are safe from any thread."""

    def __init__(
        self,
        sender: DeliverySender,
        scalars_sender: DeliverySender,
        queue: BoundedQueue,
        outbox: Outbox,
        counters: Counters,
        log: LogOnce,
        *,
        after_delivery: Callable[[Delivery], None] | None = None,
    ) -> None:
        self._sender = sender
        self._scalars = ScalarsAhead(scalars_sender, outbox, self._delivered)
        self._queue = queue
        self._outbox = outbox
        self._counters = counters
        self._log = log
        self._after_delivery = after_delivery
        self._changed = threading.Condition()
        self._stopping = False
        self._backoff = Backoff(_FIRST_RETRY_SECONDS, _LONGEST_RETRY_SECONDS)
        self._failed_attempts = 0
        self._next_attempt = 0.0
        self._encoder = threading.Thread(target=self._encode_all, name="foreshock-encoder", daemon=True)
        self._deliverer = threading.Thread(target=self._send_all, name="foreshock-sender", daemon=True)
        self._pid = os.getpid()

    def start(self) -> None:
        """Load what earlier processes left on disk, and start both threads."""
        recovered = self._outbox.recover()
        if recovered:
            self._counters.add(recovered=recovered)
        self._encoder.start()
        self._deliverer.start()
        self._scalars.start()

    @property
    def idle(self) -> bool:
        """True if everything logged so far has been delivered, rejected or dropped."""
        return self._queue.empty and not len(self._outbox)

    def flush(self, timeout_seconds: float) -> bool:
        """Try the service at once and wait until idle; False if the timeout came first."""
        return self._wait(lambda: self.idle, timeout_seconds)

    def stop(self, timeout_seconds: float) -> None:
        """Deliver until the timeout, write the rest to disk, end the threads."""
        failed_before = self._failed_attempts
        deadline = time.monotonic() + timeout_seconds
        self._wait(
            lambda: (
                self.idle
                # An attempt since the call failed: the disk keeps the rest, waiting gains nothing.
                or (self._queue.empty and self._failed_attempts > failed_before)
            ),
            timeout_seconds,
        )
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._queue.close()
        # The encoder ends when the queue is empty: the rest of the queue is encoded and written to disk.
        self._encoder.join(max(1.0, deadline - time.monotonic()))
        self._sender.interrupt()
        self._scalars.interrupt()
        self._deliverer.join(5.0)
        self._outbox.all_to_disk()

    def _wait(self, reached: Callable[[], bool], timeout_seconds: float) -> bool:
        deadline = time.monotonic() + timeout_seconds
        with self._changed:
            self._next_attempt = 0.0
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
            self._log.warning(f"invalid {type(error).__name__}", f"{work.what} is invalid and not sent: {error}")
            return
        self._outbox.append(delivery, to_disk=self._backoff.failures > 0 or self._stopping)
        self._scalars.look_again()

    def _send_all(self) -> None:
        while True:
            entry = self._next_entry()
            if entry is None:
                return
            try:
                self._send(entry)
            except Exception as error:
                self._counters.add(internal_errors=1)
                self._log.exception(f"sending {type(error).__name__}", "sending failed and is retried", error)
                self._schedule_retry(None)
            with self._changed:
                self._changed.notify_all()

    def _next_entry(self) -> OutboxEntry | None:
        """Wait for the next entry and for the end of the backoff, and return it; None when stopping."""
        with self._changed:
            while True:
                if self._stopping:
                    return None
                wait = self._next_attempt - time.monotonic()
                entry = self._outbox.at(0)
                if entry is not None and wait <= 0:
                    return entry
                self._changed.wait(wait if entry is not None else None)

    def _send(self, entry: OutboxEntry) -> None:
        """Make one attempt to deliver `entry`."""
        delivery = self._outbox.load(entry)
        if delivery is None:
            return
        try:
            response = self._send_with_scalars(delivery)
        except Rejected as error:
            self._reject(entry, delivery, error)
        except ServiceError as error:
            self._failed(entry, delivery, error)
        else:
            self._note_success()
            self._delivered(entry, response)
            if self._after_delivery is not None and not self._stopping:
                self._after_delivery(delivery)

    def _send_with_scalars(self, delivery: Delivery) -> httpx.Response | None:
        """Send a delivery; while it is one of rollouts, send the scalars of their step as well."""
        if delivery.kind != "rollouts" or self._backoff.failures > 0:
            return self._sender.send(delivery)
        self._scalars.begin(delivery)
        try:
            return self._sender.send(delivery)
        finally:
            self._scalars.end()

    def _delivered(self, entry: OutboxEntry, response: httpx.Response | None) -> None:
        duplicate = response is not None and _reports_duplicate(response.content)
        self._counters.add(delivered=1, delivered_bytes=entry.size, duplicates=int(duplicate))
        self._outbox.done(entry)

    def _failed(self, entry: OutboxEntry, delivery: Delivery, error: ServiceError) -> None:
        self._counters.add(failed_requests=1)
        if self._stopping:
            return
        if error.status is not None and error.status >= 500 and error.status not in _OVERLOAD_STATUSES:
            entry.server_faults += 1
            if entry.server_faults >= _SERVER_FAULTS_BEFORE_SKIPPING and self._next_is_delivered(entry):
                self._reject(entry, delivery, error)
                return
        if isinstance(error, Unauthorized):
            self._log.warning("key", f"the service refuses the API key; data is kept until the key is valid: {error}")
        else:
            self._log.warning("away", f"{error}; data is kept and sent later")
        self._schedule_retry(error)
        self._outbox.all_to_disk()

    def _next_is_delivered(self, entry: OutboxEntry) -> bool:
        """Try the entry after one that the service repeatedly fails on; True if the service accepts that one."""
        after = self._outbox.at(1)
        if after is None or self._outbox.at(0) is not entry or entry.needed:
            return False
        delivery = self._outbox.load(after)
        if delivery is None:
            return False
        try:
            self._sender.send(delivery)
        except ServiceError:
            return False
        self._counters.add(delivered=1, delivered_bytes=after.size)
        self._outbox.done(after)
        return True

    def _note_success(self) -> None:
        if self._backoff.failures:
            self._log.info("the service is back; sending the kept data")
            self._log.forget("away")
        self._backoff.reset()

    def _reject(self, entry: OutboxEntry, delivery: Delivery, error: ServiceError) -> None:
        self._note_success()
        self._counters.add(rejected=1)
        key = f"rejected {delivery.kind} {error.status}"
        self._log.warning(key, f"the service refused {delivery.describe()}: {error}")
        self._outbox.reject(entry, delivery, {"status": error.status, **error.problem})

    def _schedule_retry(self, error: ServiceError | None) -> None:
        delay = self._backoff.next_delay(error.retry_after_seconds if error is not None else None)
        with self._changed:
            self._failed_attempts += 1
            self._next_attempt = time.monotonic() + delay


def _reports_duplicate(body: bytes) -> bool:
    # No JSON parsing: this only feeds a counter.
    return len(body) < 4096 and b'"duplicate"' in body
