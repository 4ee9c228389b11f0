"""The threads behind a client: one encodes what the trainer logged, one sends it in order, others send ahead.

Encoding never waits for the service: encoded deliveries go to the outbox, which keeps them on disk while the service is
away or slow. The answer to a delivery decides what follows (`refusals.py`):

    2xx             delivered
    service         everything waits and is sent again, with backoff
    run, item       the run's items, or this item, wait longer and longer; the others are sent meanwhile
    final           the bytes are kept in the spool's folder `rejected`

Without deliveries the sender tells the service every `heartbeat_seconds` that this process lives.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence

import httpx

from foreshock.client.counters import Counters
from foreshock.client.deliveries import Delivery
from foreshock.client.heartbeats import Heartbeats
from foreshock.client.log_once import LogOnce
from foreshock.client.outbox import Outbox, OutboxEntry
from foreshock.client.queue import BoundedQueue, Work
from foreshock.client.refusals import scope_of
from foreshock.client.send_ahead import SendAhead
from foreshock.client.sender import DeliverySender
from foreshock.client.status import DeliveryStatus
from foreshock.errors import RolloutsError, ServiceError, Unauthorized, WeightsError
from foreshock.retry import Backoff

__all__ = ["Uploader"]

_FIRST_RETRY_SECONDS = 0.5
_LONGEST_RETRY_SECONDS = 30.0
# A refusal that a person must mend, or an item that the service fails on: asked for slowly, since it is sent again.
_FIRST_REFUSED_SECONDS = 2.0
_LONGEST_REFUSED_SECONDS = 300.0
_LONGEST_WAIT_SECONDS = 60.0


class Uploader:
    """Takes work from a queue, encodes it, and delivers it in order. All methods are safe from any thread."""

    def __init__(
        self,
        sender: DeliverySender,
        senders_ahead: Sequence[DeliverySender],
        queue: BoundedQueue,
        outbox: Outbox,
        counters: Counters,
        log: LogOnce,
        *,
        heartbeats: Heartbeats,
        before_encoding: Callable[[], None] | None = None,
        after_delivery: Callable[[Delivery], None] | None = None,
    ) -> None:
        self._sender = sender
        self._ahead = SendAhead(
            senders_ahead, outbox, delivered=self._delivered, ended=self._notify, allowed=self._may_send_ahead
        )
        self._queue = queue
        self._outbox = outbox
        self._counters = counters
        self._log = log
        self._heartbeats = heartbeats
        self._before_encoding = before_encoding
        self._after_delivery = after_delivery
        self._reason: str | None = None
        self._may_adopt_other_keys = True
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
        self._ahead.start()

    @property
    def idle(self) -> bool:
        """True if everything logged so far has been delivered, rejected or dropped."""
        return self._queue.empty and not len(self._outbox)

    def status(self) -> DeliveryStatus:
        """Return what the service does not have."""
        now = self._counters.snapshot()
        undelivered = self._queue.items + len(self._outbox)
        incomplete = undelivered or now.rejected
        return DeliveryStatus(undelivered, now.rejected, now.dropped, now.invalid, self._reason if incomplete else None)

    def flush(self, timeout_seconds: float) -> DeliveryStatus:
        """Try the service at once, also with what it refused, and wait until idle or until the timeout."""
        self._wait(lambda: self.idle, timeout_seconds)
        return self.status()

    def stop(self, timeout_seconds: float) -> None:
        """Deliver until the timeout, write the rest to disk, end the threads."""
        failed_before = self._failed_attempts
        deadline = time.monotonic() + timeout_seconds
        self._wait(
            lambda: (
                self.idle
                # An attempt since the call failed, or the service refused all that is left: the disk keeps the rest,
                # waiting gains nothing.
                or (self._queue.empty and (self._failed_attempts > failed_before or self._all_refused()))
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
        self._ahead.interrupt()
        self._deliverer.join(5.0)
        self._outbox.all_to_disk()

    @property
    def on_disk(self) -> int:
        """Number of undelivered items that the next client finds in the spool."""
        return self._outbox.on_disk

    def _wait(self, reached: Callable[[], bool], timeout_seconds: float) -> bool:
        deadline = time.monotonic() + timeout_seconds
        with self._changed:
            self._next_attempt = 0.0
            self._outbox.try_all_now()
            self._changed.notify_all()
            while not reached():
                left = deadline - time.monotonic()
                if left <= 0 or self._pid != os.getpid():
                    return False
                self._changed.wait(min(left, 0.2))
            return True

    def _all_refused(self) -> bool:
        return self._outbox.all_set_back(time.monotonic())

    def _encode_all(self) -> None:
        if self._before_encoding is not None:
            self._before_encoding()
        while (work := self._queue.get()) is not None:
            try:
                self._encode(work)
            except Exception as error:
                self._counters.add(internal_errors=1, invalid=1)
                self._log.exception(f"encoding {type(error).__name__}", f"{work.what} could not be encoded", error)
            finally:
                self._queue.release(work)
            self._notify()

    def _encode(self, work: Work) -> None:
        try:
            delivery = work.make()
        except (RolloutsError, WeightsError) as error:
            self._counters.add(invalid=1)
            self._log.warning(f"invalid {type(error).__name__}", f"{work.what} is invalid and not sent: {error}")
            return
        self._outbox.append(delivery, to_disk=self._backoff.failures > 0 or self._stopping)
        self._ahead.look()

    def _send_all(self) -> None:
        while self._wait_for_work():
            try:
                self._send_next()
            except Exception as error:
                self._counters.add(internal_errors=1)
                self._log.exception(f"sending {type(error).__name__}", "sending failed and is retried", error)
                self._schedule_retry(None)
            self._notify()
        if not self._backoff.failures:
            self._heartbeats.send_last(self.status())

    def _wait_for_work(self) -> bool:
        """Wait until an entry or a heartbeat is due; False when stopping."""
        with self._changed:
            while not self._stopping:
                now = time.monotonic()
                entry, wait = self._outbox.next_due(now)
                if entry is not None or wait is not None:
                    wait = max(wait or 0.0, self._next_attempt - now)
                beat = self._heartbeats.seconds_until_due(now)
                left = min(each for each in (wait, beat, _LONGEST_WAIT_SECONDS) if each is not None)
                if left <= 0.0:
                    return True
                self._changed.wait(left)
            return False

    def _send_next(self) -> None:
        now = time.monotonic()
        if (self._heartbeats.seconds_until_due(now) or 1.0) <= 0.0:
            self._heartbeats.send(self.status())
        entry = self._outbox.take_due(now) if self._next_attempt <= now else None
        if entry is None:
            return
        self._ahead.look()
        try:
            self._send(entry)
        finally:
            self._outbox.release(entry)
            self._ahead.look()

    def _send(self, entry: OutboxEntry) -> None:
        """Make one attempt to deliver `entry`."""
        delivery = self._outbox.load(entry)
        if delivery is None:
            return
        try:
            response = self._sender.send(delivery)
        except ServiceError as error:
            self._refused(entry, delivery, error)
            return
        self._note_success(entry)
        self._delivered(entry, response)
        self._heartbeats.note_delivery(delivery)
        if self._after_delivery is not None and not self._stopping:
            self._after_delivery(delivery)

    def _may_send_ahead(self) -> bool:
        return self._backoff.failures == 0 and not self._stopping

    def _delivered(self, entry: OutboxEntry, response: httpx.Response | None) -> None:
        duplicate = response is not None and _reports_duplicate(response.content)
        self._counters.add(delivered=1, delivered_bytes=entry.size, duplicates=int(duplicate))
        self._outbox.done(entry)

    def _refused(self, entry: OutboxEntry, delivery: Delivery, error: ServiceError) -> None:
        scope = scope_of(error, registering=self._sender.registering)
        self._reason = str(error)
        if scope == "final":
            self._reject(entry, delivery, error)
            return
        self._counters.add(failed_requests=1)
        if self._stopping:
            return
        if isinstance(error, Unauthorized):
            self._log.warning("key", f"the service refuses the API key; data is kept until the key is valid: {error}")
        elif error.status is None or error.status >= 500:
            self._log.warning("away", f"{error}; data is kept and sent later")
        else:
            text = f"{error}; the data is kept and sent again when the configuration is corrected"
            self._log.warning(f"refused {error.status}", text)
        if scope == "service" or (error.status is not None and error.status >= 500):
            self._schedule_retry(error)
        if scope == "run" and self._outbox.leave_to_others(entry):
            return
        if scope != "service":
            self._outbox.set_back(entry, time.monotonic(), _refused_backoff, whole_run=scope == "run")
        self._outbox.all_to_disk()

    def _note_success(self, entry: OutboxEntry) -> None:
        if self._backoff.failures:
            self._log.info("the service is back; sending the kept data")
            self._log.forget("away")
        self._backoff.reset()
        self._outbox.accepts(entry)
        if self._may_adopt_other_keys:
            # The service accepts this client's key: what the project's other keys left behind can be sent with it.
            self._may_adopt_other_keys = False
            self._counters.add(recovered=self._outbox.recover(other_keys=True))

    def _reject(self, entry: OutboxEntry, delivery: Delivery, error: ServiceError) -> None:
        self._backoff.reset()
        self._counters.add(rejected=1)
        key = f"rejected {delivery.kind} {error.status}"
        self._log.warning(key, f"the service refused {delivery.describe()}: {error}")
        self._outbox.reject(entry, delivery, {"status": error.status, **error.problem})

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _schedule_retry(self, error: ServiceError | None) -> None:
        delay = self._backoff.next_delay(error.retry_after_seconds if error is not None else None)
        with self._changed:
            self._failed_attempts += 1
            self._next_attempt = time.monotonic() + delay


def _refused_backoff() -> Backoff:
    return Backoff(_FIRST_REFUSED_SECONDS, _LONGEST_REFUSED_SECONDS)


def _reports_duplicate(body: bytes) -> bool:
    # No JSON parsing: this only feeds a counter.
    return len(body) < 4096 and b'"duplicate"' in body
