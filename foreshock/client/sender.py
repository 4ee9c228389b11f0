"""The sender's thread: it sends the items of the outbox in order, several at once in a backlog, and heartbeats.

The answer to a delivery decides what follows (`registrar.scope_of`):

    2xx             delivered
    service         everything waits and is sent again, with backoff
    run, item       the run's items, or this item, wait longer and longer; the others are sent meanwhile
    final           the item's file is kept as `.rejected`; if it is invalid (422), after a second try
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import SimpleQueue

import httpx

from foreshock.client.connection import TRAINER_ANSWER_BYTES, ServiceConnection
from foreshock.client.deliveries import Delivery
from foreshock.client.queues import Outbox
from foreshock.client.registrar import Heartbeats, Registrar, Scope, scope_of
from foreshock.client.reporting import Counters, DeliveryStatus, LogOnce
from foreshock.client.settings import ClientSettings
from foreshock.client.spool import Item
from foreshock.errors import ServiceError, Unauthorized
from foreshock.retry import Backoff

__all__ = ["Sender"]

_FIRST_RETRY_SECONDS = 0.5
_LONGEST_RETRY_SECONDS = 30.0
_LONGEST_WAIT_SECONDS = 60.0
_LONGEST_STOP_SECONDS = 60.0

# While so many items wait, those of neighbouring steps are sent at once: over one connection a service that answers in
# 0.1 s takes ten items a second. A step may come so many steps late: the service keeps the detectors' states after its
# newest four steps, from which it judges such a step again.
_BACKLOG, _STEPS_LATE = 8, 3
_CONNECTIONS, _MOST_BYTES_AT_ONCE = 4, 16 << 20

Answer = httpx.Response | Exception | None
"""What became of a delivery; None: a registration."""


@dataclass(slots=True)
class _Lane:
    """A further connection for a backlog. Its thread answers each delivery, until it gets None."""

    connection: ServiceConnection
    deliveries: SimpleQueue[Delivery | None] = field(default_factory=SimpleQueue)
    answers: SimpleQueue[Answer] = field(default_factory=SimpleQueue)


class Sender:
    """Delivers the items of an outbox in order. All methods are safe from any thread.

    `status` returns what is missing; `after_delivery` is called in this thread with each delivery that was accepted.
    """

    def __init__(
        self,
        settings: ClientSettings,
        outbox: Outbox,
        counters: Counters,
        log: LogOnce,
        *,
        status: Callable[[], DeliveryStatus],
        after_delivery: Callable[[Delivery], None],
    ) -> None:
        # What keeps the service from taking anything, and the newest refusal that is final.
        self._failure: str | None = None
        self._rejection: str | None = None
        self.failed_attempts = 0
        """Failures that concern the whole service, so far."""
        self._settings = settings
        self.connection = self._new_connection()
        self._lanes: list[_Lane] = []
        self._at_once = 1
        self.registrar = Registrar(self.connection, log)
        self.heartbeats = Heartbeats(self.connection, self.registrar, interval_seconds=settings.heartbeat_seconds)
        self._outbox = outbox
        self._counters = counters
        self._log = log
        self._status = status
        self._after_delivery = after_delivery
        self._may_adopt_other_keys = True
        self._changed = threading.Condition()
        self._stopping = False
        self._interrupted = False
        self._complete = threading.Event()
        self._backoff = Backoff(_FIRST_RETRY_SECONDS, _LONGEST_RETRY_SECONDS)
        self._next_attempt = 0.0
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._send_all, name="foreshock-sender", daemon=True)

    @property
    def reason(self) -> str | None:
        """The reason for which items are not delivered now, or else were rejected; None without any."""
        return self._failure or self._outbox.reason or self._rejection

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def wake(self) -> None:
        """Look for items now."""
        with self._changed:
            self._changed.notify_all()

    def try_now(self) -> None:
        """Try the service at once, also with what it refused."""
        with self._changed:
            self._next_attempt = 0.0
            self._outbox.try_all_now()
            self._changed.notify_all()

    def wait(self, reached: Callable[[], bool], timeout_seconds: float) -> None:
        """Try the service at once, and wait until `reached()` or the timeout."""
        self.try_now()
        deadline = time.monotonic() + timeout_seconds
        with self._changed:
            while not reached():
                left = deadline - time.monotonic()
                if left <= 0 or self._pid != os.getpid():
                    return
                self._changed.wait(min(left, 0.2))

    def begin_stop(self) -> None:
        """After the present request, send nothing but a report of losses."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()

    def stop(self, deadline: float) -> None:
        """Sync what waits and end the thread by `deadline` of `time.monotonic`; nothing more is appended.

        A request that is still under way halfway to the deadline is made to fail. A disk that hangs is left alone.
        """
        self._complete.set()
        self._thread.join(max(0.0, deadline - time.monotonic()) / 2)
        self._interrupted = True
        connections = [self.connection, *(lane.connection for lane in self._lanes)]
        for each in connections:
            each.interrupt()
        self._thread.join(max(0.0, deadline - time.monotonic()))
        for lane in self._lanes:
            lane.deliveries.put(None)
        for each in connections:
            each.close()

    def _new_connection(self) -> ServiceConnection:
        return ServiceConnection(
            self._settings.url,
            self._settings.api_key,
            timeout_seconds=self._settings.timeout_seconds,
            max_answer_bytes=TRAINER_ANSWER_BYTES,
        )

    def _send_all(self) -> None:
        while self._wait_for_work():
            try:
                if self.heartbeats.due_at() <= time.monotonic():
                    self.heartbeats.send(self._status())
                self._send_next()
            except Exception as error:
                self._counters.add(internal_errors=1)
                self._log.exception(f"sending {type(error).__name__}", "sending failed and is retried", error)
                self._schedule_retry(None)
            self.wake()
        if not (self._backoff.failures or self._interrupted):
            self.heartbeats.send_last(self._status())
        self._complete.wait(_LONGEST_STOP_SECONDS)
        self._outbox.sync()

    def _wait_for_work(self) -> bool:
        """Wait until an item or a heartbeat is due; False when stopping."""
        with self._changed:
            while not self._stopping:
                now = time.monotonic()
                left = min(self.heartbeats.due_at() - now, _LONGEST_WAIT_SECONDS)
                left = min(left, max(self._outbox.next_due(), self._next_attempt) - now)
                if left <= 0.0:
                    return True
                self._changed.wait(left)
            return False

    def _send_next(self) -> None:
        chosen = self._chosen(time.monotonic())
        lanes = self._lanes[: max(0, len(chosen) - 1)]
        for lane, (_, delivery) in zip(lanes, chosen[1:], strict=True):
            lane.deliveries.put(delivery)
        answers = [self._answer(delivery, self.connection) for _, delivery in chosen[:1]]
        answers += [lane.answers.get() for lane in lanes]
        refused = 0
        for (item, delivery), answer in zip(chosen, answers, strict=True):
            if isinstance(answer, ServiceError):
                refused += self._refused(item, delivery, answer) != "final"
            elif isinstance(answer, Exception):
                raise answer
            else:
                self._delivered(item, delivery, answer)
        # One more each time. After a refusal only one: the service may limit parallel uploads, or be away.
        self._at_once = 1 if refused else min(self._at_once + 1, _CONNECTIONS)

    def _answer(self, delivery: Delivery, connection: ServiceConnection) -> Answer:
        try:
            return self.registrar.send(delivery, connection)
        except Exception as error:
            return error

    def _open_lanes(self, count: int) -> int:
        """Open further lanes until there are `count`, or no thread can be started; return how many may be used."""
        while len(self._lanes) < count:
            lane = _Lane(self._new_connection())
            thread = threading.Thread(target=self._send_in_lane, args=(lane,), name="foreshock-sender", daemon=True)
            try:
                thread.start()
            except RuntimeError:
                # The interpreter ends: what is left is sent over one connection.
                lane.connection.close()
                return len(self._lanes)
            self._lanes.append(lane)
        return count

    def _send_in_lane(self, lane: _Lane) -> None:
        while (delivery := lane.deliveries.get()) is not None:
            lane.answers.put(self._answer(delivery, lane.connection))

    def _chosen(self, now: float) -> list[tuple[Item, Delivery]]:
        """Return what to send now: the first item that is due and, in a backlog, those behind it that may join it."""
        if self._next_attempt > now:
            return []
        most = 1 + self._open_lanes(self._at_once - 1) if len(self._outbox) > _BACKLOG else 1
        chosen: list[tuple[Item, Delivery]] = []
        for item in self._outbox.due(now, 1 if most == 1 else 2 * most):
            if chosen and sum(each.size for each, _ in chosen) + item.size > _MOST_BYTES_AT_ONCE:
                break
            delivery = self._outbox.load(item)
            if delivery is None:
                continue
            if chosen and not self._may_join(chosen[0][1], delivery):
                break
            # Of two reports to one path the later one must arrive last: it waits.
            if all(each.path != delivery.path for _, each in chosen):
                chosen.append((item, delivery))
            if len(chosen) == most:
                break
        return chosen

    def _may_join(self, first: Delivery, delivery: Delivery) -> bool:
        """Return whether a delivery may be sent at the same time as the first one, so that it may arrive before it."""
        is_near = delivery.step >= 0 and 0 <= delivery.step - first.step <= _STEPS_LATE
        return (
            first.step >= 0
            and (is_near or delivery.kind == "acknowledgement")
            and first.registration == delivery.registration
            and self.registrar.attempt_number(first.registration) is not None
        )

    def _delivered(self, item: Item, delivery: Delivery, response: httpx.Response | None) -> None:
        if self._backoff.failures:
            self._log.info("the service is back; sending the kept data")
            self._log.forget("away")
            self._backoff.reset()
        self._failure = None
        self._outbox.accepts(item)
        if self._may_adopt_other_keys:
            # The service accepts this client's key: what the project's other keys left behind can be sent with it.
            self._may_adopt_other_keys = False
            self._outbox.recover(other_keys=True)
        # No JSON parsing: this only feeds a counter.
        duplicate = response is not None and len(response.content) < 4096 and b'"duplicate"' in response.content
        self._counters.add(delivered=1, delivered_bytes=item.size, duplicates=int(duplicate))
        self._outbox.done(item)
        self.heartbeats.note_delivery(delivery)
        if not self._stopping:
            self._after_delivery(delivery)

    def _refused(self, item: Item, delivery: Delivery, error: ServiceError) -> Scope:
        registering = self.registrar.attempt_number(delivery.registration) is None
        scope = scope_of(error, registering=registering)
        if scope == "final" and error.status == httpx.codes.UNPROCESSABLE_ENTITY and not item.is_doubted:
            # This client encoded these bytes: they may have been damaged on their way. They are sent once more, later.
            item.is_doubted = True
            scope = "item"
        if scope == "final":
            self._failure, self._rejection = None, str(error)
            self._backoff.reset()
            self._outbox.reject(item, f"the service refused {delivery.describe()}: {error}")
            return scope
        self._counters.add(failed_requests=1)
        self._failure = str(error) if scope == "service" else None
        if self._stopping:
            return scope
        self._warn(error)
        if scope == "service" or (error.status is not None and error.status >= 500):
            self._schedule_retry(error)
        if scope != "service":
            self._outbox.set_back(item, str(error), whole_run=scope == "run")
        self._outbox.sync()
        return scope

    def _warn(self, error: ServiceError) -> None:
        if isinstance(error, Unauthorized):
            self._log.warning("key", f"the service refuses the API key; data is kept until the key is valid: {error}")
        elif error.status is None or error.status >= 500:
            self._log.warning("away", f"{error}; data is kept and sent later")
        elif error.status == httpx.codes.UNPROCESSABLE_ENTITY:
            self._log.warning("refused 422", f"{error}; what it concerns is sent again before it counts as invalid")
        else:
            text = f"{error}; the data is kept and sent again when the configuration is corrected"
            self._log.warning(f"refused {error.status}", text)

    def _schedule_retry(self, error: ServiceError | None) -> None:
        if self._next_attempt > time.monotonic():
            # Another of the requests that were sent at once failed too.
            return
        delay = self._backoff.next_delay(error.retry_after_seconds if error is not None else None)
        with self._changed:
            self.failed_attempts += 1
            self._next_attempt = time.monotonic() + delay
