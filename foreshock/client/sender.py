"""The sender's thread: it sends the items of the spool in order, and heartbeats between them.

The answer to a delivery decides what follows (`scope_of`):

    2xx             delivered
    service         everything waits and is sent again, with backoff
    run, item       the run's items, or this item, wait longer and longer; the others are sent meanwhile
    final           the item's file is kept as `.rejected`; if it is invalid (422), after a second try
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import httpx

from foreshock.client.connection import TRAINER_ANSWER_BYTES, ServiceConnection
from foreshock.client.deliveries import Delivery
from foreshock.client.heartbeats import Heartbeats
from foreshock.client.registrar import Registrar
from foreshock.client.reporting import Counters, DeliveryStatus, LogOnce
from foreshock.client.settings import ClientSettings
from foreshock.client.spool import Item, Spool
from foreshock.errors import (
    HOST_NOT_ALLOWED,
    PROBLEM_TYPE_PREFIX,
    ServiceError,
    ServiceUnavailable,
    SpoolError,
    Unauthorized,
)
from foreshock.retry import Backoff

__all__ = ["Sender", "scope_of"]

Scope = Literal["service", "run", "item", "final"]

# The first and the longest delay: while the service is away; and after a refusal that a person must correct, or for an
# item that the service fails on.
_AWAY_SECONDS = 0.5, 30.0
_REFUSED_SECONDS = 2.0, 300.0
_LONGEST_WAIT_SECONDS = 60.0
_LONGEST_STOP_SECONDS = 60.0
_HOST_NOT_ALLOWED = PROBLEM_TYPE_PREFIX + HOST_NOT_ALLOWED

DelayKey = Item | tuple[str, str] | None
"""What is sent later: an item, all items of a run, or everything (None)."""


@dataclass(slots=True)
class _Delay:
    until: float
    backoff: Backoff
    reason: str


class Sender:
    """Delivers the items of a spool in order. All methods are safe from any thread.

    `status` returns what is missing; `after_delivery` is called in this thread with each delivery that was accepted.
    """

    def __init__(
        self,
        settings: ClientSettings,
        spool: Spool,
        counters: Counters,
        log: LogOnce,
        *,
        status: Callable[[], DeliveryStatus],
        after_delivery: Callable[[Delivery], None],
    ) -> None:
        self.connection = ServiceConnection(
            settings.url,
            settings.api_key,
            timeout_seconds=settings.timeout_seconds,
            max_answer_bytes=TRAINER_ANSWER_BYTES,
        )
        self.registrar = Registrar(self.connection, log)
        self.heartbeats = Heartbeats(self.connection, self.registrar, interval_seconds=settings.heartbeat_seconds)
        self._spool = spool
        self._counters = counters
        self._log = log
        self._status = status
        self._after_delivery = after_delivery
        self._may_adopt_other_keys = True
        # In the order of their failures.
        self._delays: dict[DelayKey, _Delay] = {}
        self._rejection: str | None = None
        self._changed = threading.Condition()
        self._stopping = False
        self._complete = threading.Event()
        self._thread = threading.Thread(target=self._send_all, name="foreshock-sender", daemon=True)

    @property
    def reason(self) -> str | None:
        """The newest reason for which items are not delivered now, or else were rejected; None without any."""
        delays = list(self._delays.values())
        return delays[-1].reason if delays else self._rejection

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def wake(self) -> None:
        """Look for items now."""
        with self._changed:
            self._changed.notify_all()

    def try_now(self) -> None:
        """Try everything at once. The delays continue to grow with the next failure."""
        with self._changed:
            for delay in self._delays.values():
                delay.until = 0.0
            self._changed.notify_all()

    def wait(self, reached: Callable[[], bool], timeout_seconds: float) -> None:
        """Try everything at once, and wait until `reached()` or the timeout."""
        self.try_now()
        deadline = time.monotonic() + timeout_seconds
        with self._changed:
            while not reached() and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(min(left, 0.2))

    def next(self) -> tuple[float, Item | None]:
        """Return the item to send next, and in how many seconds it can be sent."""
        seconds, item = self._spool.next(lambda each: max(self._seconds_until(each), self._seconds_until(each.run)))
        return max(seconds, self._seconds_until(None)), item

    def begin_stop(self) -> None:
        """After the present request, send nothing but a report of losses."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()

    def end_request(self, deadline: float) -> None:
        """Make the request fail that is still under way at `deadline` of `time.monotonic`; nothing more is appended."""
        self._complete.set()
        self._thread.join(max(0.0, deadline - time.monotonic()))
        self.connection.interrupt()

    def stop(self, deadline: float) -> None:
        """Wait until the thread has synced what waits, until `deadline`. A disk that hangs is left alone."""
        self._thread.join(max(0.0, deadline - time.monotonic()))
        self.connection.close()

    def _send_all(self) -> None:
        while self._wait_for_work():
            try:
                if self.heartbeats.due_at() <= time.monotonic():
                    self.heartbeats.send(self._status())
                self._send_next()
            except Exception as error:
                self._counters.add(internal_errors=1)
                self._log.exception(f"sending {type(error).__name__}", "sending failed and is retried", error)
                self._delay(None, f"sending failed: {error!r}")
            self.wake()
        if None not in self._delays and not self.connection.is_interrupted:
            self.heartbeats.send_last(self._status())
        self._complete.wait(_LONGEST_STOP_SECONDS)
        self._spool.sync()

    def _wait_for_work(self) -> bool:
        """Wait until an item or a heartbeat is due; False when stopping."""
        with self._changed:
            while not self._stopping:
                left = min(self.next()[0], self.heartbeats.due_at() - time.monotonic(), _LONGEST_WAIT_SECONDS)
                if left <= 0.0:
                    return True
                self._changed.wait(left)
            return False

    def _send_next(self) -> None:
        seconds, item = self.next()
        if item is None or seconds > 0.0:
            return
        try:
            delivery = self._spool.load(item)
        except (ValueError, SpoolError) as error:
            self._reject(item, f"{item.path} is damaged ({error})")
            return
        try:
            response = self.registrar.send(delivery)
        except ServiceError as error:
            self._refused(item, delivery, error)
        else:
            self._delivered(item, delivery, response)

    def _delivered(self, item: Item, delivery: Delivery, response: httpx.Response | None) -> None:
        """`response` is None for a registration."""
        self._service_answers()
        with self._changed:
            self._delays.pop(item.run, None)
            self._delays.pop(item, None)
        if self._may_adopt_other_keys:
            # The service accepts this client's key: what the project's other keys left behind can be sent with it.
            self._may_adopt_other_keys = False
            self._spool.adopt(other_keys=True)
        # No JSON parsing: this only feeds a counter.
        duplicate = response is not None and len(response.content) < 4096 and b'"duplicate"' in response.content
        self._counters.add(delivered=1, delivered_bytes=item.size, duplicates=int(duplicate))
        self._spool.remove(item)
        self.heartbeats.note_delivery(delivery)
        if not self._stopping:
            self._after_delivery(delivery)

    def _refused(self, item: Item, delivery: Delivery, error: ServiceError) -> None:
        registering = self.registrar.attempt_number(delivery.registration) is None
        scope = scope_of(error, registering=registering)
        if scope == "final" and error.status == httpx.codes.UNPROCESSABLE_ENTITY and not item.is_doubted:
            # This client encoded these bytes: they may have been damaged on their way. They are sent once more, later.
            item.is_doubted = True
            scope = "item"
        if scope == "final":
            self._service_answers()
            self._rejection = str(error)
            self._reject(item, f"the service refused {delivery.describe()}: {error}")
            return
        self._counters.add(failed_requests=1)
        if scope != "service":
            self._delay(item.run if scope == "run" else item, str(error))
        if scope == "service" or (error.status or 0) >= 500:
            self._delay(None, str(error), error.retry_after_seconds)
        else:
            self._service_answers()
        if not self._stopping:
            self._warn(error)
            self._spool.sync()

    def _reject(self, item: Item, reason: str) -> None:
        """Set an item aside, and log its file and the reason; it is tried again later if the disk does not take it."""
        try:
            path = self._spool.set_aside(item)
        except SpoolError as error:
            self._log.warning("rejected", f"{reason}; {error}: the item stays undelivered, and is tried again later")
            self._delay(item, str(error))
            return
        with self._changed:
            self._delays.pop(item, None)
        self._counters.add(rejected=1)
        kept = "not kept, as the setting max_rejected_bytes is reached" if path is None else f"kept as {path}"
        self._log.warning(f"{reason} {path}", f"{reason}; the item is {kept}")

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

    def _delay(self, key: DelayKey, reason: str, retry_after_seconds: float | None = None) -> None:
        """Send something later: each time after a longer delay, until the service accepts it."""
        with self._changed:
            known = self._delays.pop(key, None)
            backoff = Backoff(*(_AWAY_SECONDS if key is None else _REFUSED_SECONDS)) if known is None else known.backoff
            until = time.monotonic() + backoff.next_delay(retry_after_seconds)
            self._delays[key] = _Delay(until, backoff, reason)

    def _seconds_until(self, key: DelayKey) -> float:
        delay = self._delays.get(key)
        return 0.0 if delay is None else max(0.0, delay.until - time.monotonic())

    def _service_answers(self) -> None:
        with self._changed:
            was_away = self._delays.pop(None, None) is not None
        if was_away:
            self._log.info("the service is back; sending the kept data")
            self._log.forget("away")


def scope_of(error: ServiceError, *, registering: bool) -> Scope:
    """Return what a failed request concerns, which decides when it is retried; only "final" rejects the item.

        service   no answer, 408, 425, 429, 502 to 504, a redirect; and refusals of every request of this client that a
                  change of configuration corrects: 400 for its Host, 401, 421
        run       403 (the key lacks the scope or the project), 404 (no such run or attempt, or another service), and
                  whatever else is refused when the run is registered
        item      413 (a limit of the service), other 5xx, and anything else that is no proof of an invalid item
        final     409 (other bytes are stored), 410 (the run was deleted), 422 (invalid): the same bytes fail again

    `registering`: the request was that of the run or attempt, not of the item.
    """
    status = error.status
    if status is None or status in (401, 421, 502, 503, 504) or error.problem.get("type") == _HOST_NOT_ALLOWED:
        return "service"
    if status in (403, 404):
        return "run"
    if status in (409, 410):
        return "final"
    if isinstance(error, ServiceUnavailable) and status < 500:
        return "service"
    if registering and status < 500:
        return "run"
    return "final" if status == 422 else "item"
