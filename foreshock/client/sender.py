"""The thread that sends: each item of the outbox in order, and heartbeats between them.

Runs and attempts are registered when something of theirs is first sent. The answer to a delivery decides what follows
(`scope_of`):

    2xx             delivered
    service         everything waits and is sent again, with backoff
    run, item       the run's items, or this item, wait longer and longer; the others are sent meanwhile
    final           the bytes are kept in the spool's folder `rejected`
"""

from __future__ import annotations

import os
import re
import socket
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any, Literal

import httpx

from foreshock.client.connection import ServiceConnection, wrong_service
from foreshock.client.deliveries import Delivery, Registration
from foreshock.client.queues import Outbox
from foreshock.client.reporting import Counters, DeliveryStatus, LogOnce
from foreshock.client.spool import Item
from foreshock.errors import (
    HOST_NOT_ALLOWED,
    PROBLEM_TYPE_PREFIX,
    Rejected,
    ServiceError,
    ServiceUnavailable,
    Unauthorized,
)
from foreshock.retry import Backoff

__all__ = ["Heartbeats", "Registrar", "Scope", "Sender", "scope_of"]

Scope = Literal["service", "run", "item", "final"]

_IDENTIFIER = re.compile(r"[A-Za-z0-9_-]{1,64}")
_HOST_NOT_ALLOWED = PROBLEM_TYPE_PREFIX + HOST_NOT_ALLOWED


class Registrar:
    """Sends deliveries over one connection, and registers their runs and attempts: both calls are get-or-create.

    Used by one thread, except `run_id` and `attempt_number`.
    """

    def __init__(self, connection: ServiceConnection, log: LogOnce) -> None:
        self.registering = False
        """True while, or if the last request failed while, run and attempt were registered."""
        self._connection = connection
        self._log = log
        self._runs: dict[tuple[str, str], str] = {}
        self._attempts: dict[tuple[str, str, str], int] = {}

    def run_id(self, registration: Registration) -> str | None:
        """Return the run's id at the service, None until it is registered."""
        return self._runs.get(registration.run_identity)

    def attempt_number(self, registration: Registration) -> int | None:
        """Return the attempt's number, None until it is registered."""
        return self._attempts.get(registration.attempt_identity)

    def send(self, delivery: Delivery) -> httpx.Response | None:
        """Send a delivery and return the answer, None for a registration. Raises ServiceError."""
        registration = delivery.registration
        known_before = self.run_id(registration) is not None
        try:
            return self._send_once(delivery)
        except Rejected as error:
            if error.status != httpx.codes.NOT_FOUND or not known_before:
                raise
        # The service does not know the run: its database may have been replaced.
        self._runs.pop(registration.run_identity, None)
        self._attempts.pop(registration.attempt_identity, None)
        return self._send_once(delivery)

    def _send_once(self, delivery: Delivery) -> httpx.Response | None:
        self.registering = True
        run, attempt = self._register(delivery.registration)
        self.registering = False
        if not delivery.path:
            return None
        return self._connection.request(
            delivery.method,
            delivery.path.format(run=run, attempt=attempt),
            query={name: value.format(run=run, attempt=attempt) for name, value in delivery.query.items()},
            content=delivery.slices(),
            headers={"Content-Type": delivery.content_type, "Content-Length": str(len(delivery.body))},
        )

    def _register(self, registration: Registration) -> tuple[str, int]:
        """Return the run's id and the attempt's number, registering them if needed. Raises ServiceError."""
        run = self.run_id(registration)
        if run is None:
            run = str(self._post("/v1/runs", registration.run, registration.identified.run, "id"))
            self._runs[registration.run_identity] = run
        attempt = self.attempt_number(registration)
        if attempt is None:
            path = f"/v1/runs/{run}/attempts"
            attempt = int(self._post(path, registration.attempt, registration.identified.attempt, "attempt"))
            self._attempts[registration.attempt_identity] = attempt
        return run, attempt

    def _post(self, path: str, body: Any, identity: Any, field: str) -> Any:
        """Get or create by `body`; by `identity` alone if the service finds the description in `body` invalid."""
        try:
            return self._created(path, body, field)
        except Rejected as error:
            if path == "/v1/runs" and error.status in (httpx.codes.NOT_FOUND, httpx.codes.METHOD_NOT_ALLOWED):
                # Every Foreshock service has POST /v1/runs.
                raise wrong_service(self._connection.url) from error
            if error.status != httpx.codes.UNPROCESSABLE_ENTITY or body == identity:
                raise
            self._log.warning(
                f"description {path}", f"the service refused the run's description, which is left out: {error}"
            )
        return self._created(path, identity, field)

    def _created(self, path: str, body: Any, field: str) -> Any:
        answer = self._connection.decoded(self._connection.request("POST", path, json_body=dict(body)))
        found = answer.get(field) if isinstance(answer, dict) else None
        # It becomes a part of paths.
        known = isinstance(found, str) and _IDENTIFIER.fullmatch(found[:100]) is not None
        if field == "attempt":
            known = type(found) is int and 0 <= found < 1 << 31
        if not known:
            raise wrong_service(self._connection.url)
        return found


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


_FIRST_RETRY_SECONDS = 0.5
_LONGEST_RETRY_SECONDS = 30.0
# A refusal that a person must mend, or an item that the service fails on: asked for slowly, since it is sent again.
_FIRST_REFUSED_SECONDS = 2.0
_LONGEST_REFUSED_SECONDS = 300.0
_LONGEST_WAIT_SECONDS = 60.0
_LONGEST_STOP_SECONDS = 60.0

_HEARTBEAT_TIMEOUT_SECONDS = 10.0


class Heartbeats:
    """Tells the service that a trainer lives, and what its client could not deliver, while its run is not finished."""

    def __init__(self, connection: ServiceConnection, registrar: Registrar, *, interval_seconds: float) -> None:
        self._connection = connection
        self._registrar = registrar
        self._interval = interval_seconds
        self._registration: Registration | None = None
        self._next = 0.0
        self._client = f"{socket.gethostname()[:100]}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self._shard: int | None = None
        self._finished = False
        self._reported = DeliveryStatus()

    def start(self, registration: Registration, shard: int | None) -> None:
        """Send heartbeats for this run and attempt from now on; `shard` names the rank, if it is known."""
        self._shard = shard
        self._registration = registration
        # The registration itself is the first sign of life.
        self._next = time.monotonic() + self._interval

    def due_at(self) -> float:
        """Return the `time.monotonic` of the next heartbeat; infinity if there is no run to send it for."""
        return self._next if self._is_registered() and not self._finished else float("inf")

    def note_delivery(self, delivery: Delivery) -> None:
        """Stop when the end of the run was delivered."""
        registration = self._registration
        if delivery.kind == "state" and registration is not None:
            self._finished |= delivery.registration.run_identity == registration.run_identity

    def send_last(self, status: DeliveryStatus) -> None:
        """Report losses that no heartbeat has reported."""
        if self._is_registered() and status.counts != self._reported.counts:
            self.send(status)

    def send(self, status: DeliveryStatus) -> None:
        """Send one heartbeat. A failure is ignored: the next one follows."""
        registration = self._registration
        assert registration is not None
        self._next = time.monotonic() + self._interval
        run, attempt = self._registrar.run_id(registration), self._registrar.attempt_number(registration)
        body = {
            "shard": self._shard,
            **dict(zip(("undelivered", "rejected", "dropped", "invalid"), status.counts, strict=True)),
            "reason": None if status.reason is None else status.reason[:500],
        }
        path = f"/v1/runs/{run}/attempts/{attempt}/clients/{self._client}"
        try:
            self._connection.request("PUT", path, json_body=body, timeout_seconds=_HEARTBEAT_TIMEOUT_SECONDS)
            self._reported = status
        except Rejected as error:
            if error.status in (404, 405, 410):
                # An older service, or a run that was deleted.
                self._registration = None
        except ServiceError:
            pass

    def _is_registered(self) -> bool:
        registration = self._registration
        return registration is not None and self._registrar.attempt_number(registration) is not None


class Sender:
    """Delivers the items of an outbox in order. All methods are safe from any thread.

    `status` returns what is missing; `after_delivery` is called in this thread with each delivery that was accepted.
    """

    def __init__(
        self,
        connection: ServiceConnection,
        registrar: Registrar,
        heartbeats: Heartbeats,
        outbox: Outbox,
        counters: Counters,
        log: LogOnce,
        *,
        status: Callable[[], DeliveryStatus],
        after_delivery: Callable[[Delivery], None],
    ) -> None:
        self.reason: str | None = None
        """The newest refusal or failure."""
        self.failed_attempts = 0
        """Failures that concern the whole service, so far."""
        self._connection = connection
        self._registrar = registrar
        self._heartbeats = heartbeats
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
        """Send nothing more after the request that is under way, but a report of losses."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()

    def stop(self, deadline: float) -> None:
        """Nothing more is appended: sync what waits, and end the thread by `deadline` of `time.monotonic`.

        A request that is still under way halfway to the deadline is made to fail. A disk that hangs is left alone.
        """
        self._complete.set()
        self._thread.join(max(0.0, deadline - time.monotonic()) / 2)
        self._interrupted = True
        self._connection.interrupt()
        self._thread.join(max(0.0, deadline - time.monotonic()))

    def _send_all(self) -> None:
        while self._wait_for_work():
            try:
                if self._heartbeats.due_at() <= time.monotonic():
                    self._heartbeats.send(self._status())
                self._send_next()
            except Exception as error:
                self._counters.add(internal_errors=1)
                self._log.exception(f"sending {type(error).__name__}", "sending failed and is retried", error)
                self._schedule_retry(None)
            self.wake()
        if not (self._backoff.failures or self._interrupted):
            self._heartbeats.send_last(self._status())
        self._complete.wait(_LONGEST_STOP_SECONDS)
        self._outbox.sync()

    def _wait_for_work(self) -> bool:
        """Wait until an item or a heartbeat is due; False when stopping."""
        with self._changed:
            while not self._stopping:
                now = time.monotonic()
                left = min(self._heartbeats.due_at() - now, _LONGEST_WAIT_SECONDS)
                _, wait = self._outbox.next_due(now)
                if wait is not None:
                    left = min(left, max(wait, self._next_attempt - now))
                if left <= 0.0:
                    return True
                self._changed.wait(left)
            return False

    def _send_next(self) -> None:
        now = time.monotonic()
        item = self._outbox.next_due(now)[0] if self._next_attempt <= now else None
        delivery = None if item is None else self._outbox.load(item)
        if item is None or delivery is None:
            return
        try:
            response = self._registrar.send(delivery)
        except ServiceError as error:
            self._refused(item, delivery, error)
            return
        self._note_success(item)
        # No JSON parsing: this only feeds a counter.
        duplicate = response is not None and len(response.content) < 4096 and b'"duplicate"' in response.content
        self._counters.add(delivered=1, delivered_bytes=item.size, duplicates=int(duplicate))
        self._outbox.done(item)
        self._heartbeats.note_delivery(delivery)
        if not self._stopping:
            self._after_delivery(delivery)

    def _refused(self, item: Item, delivery: Delivery, error: ServiceError) -> None:
        scope = scope_of(error, registering=self._registrar.registering)
        self.reason = str(error)
        if scope == "final":
            self._backoff.reset()
            self._counters.add(rejected=1)
            key = f"rejected {delivery.kind} {error.status}"
            self._log.warning(key, f"the service refused {delivery.describe()}: {error}")
            self._outbox.reject(item, delivery, {"status": error.status, **error.problem})
            return
        self._counters.add(failed_requests=1)
        if self._stopping:
            return
        self._warn(error)
        if scope == "service" or (error.status is not None and error.status >= 500):
            self._schedule_retry(error)
        if scope != "service":
            backoff = Backoff(_FIRST_REFUSED_SECONDS, _LONGEST_REFUSED_SECONDS)
            self._outbox.set_back(item, time.monotonic(), backoff, whole_run=scope == "run")
        self._outbox.sync()

    def _warn(self, error: ServiceError) -> None:
        if isinstance(error, Unauthorized):
            self._log.warning("key", f"the service refuses the API key; data is kept until the key is valid: {error}")
        elif error.status is None or error.status >= 500:
            self._log.warning("away", f"{error}; data is kept and sent later")
        else:
            text = f"{error}; the data is kept and sent again when the configuration is corrected"
            self._log.warning(f"refused {error.status}", text)

    def _note_success(self, item: Item) -> None:
        if self._backoff.failures:
            self._log.info("the service is back; sending the kept data")
            self._log.forget("away")
        self._backoff.reset()
        self._outbox.accepts(item)
        if self._may_adopt_other_keys:
            # The service accepts this client's key: what the project's other keys left behind can be sent with it.
            self._may_adopt_other_keys = False
            self._outbox.recover(other_keys=True)

    def _schedule_retry(self, error: ServiceError | None) -> None:
        delay = self._backoff.next_delay(error.retry_after_seconds if error is not None else None)
        with self._changed:
            self.failed_attempts += 1
            self._next_attempt = time.monotonic() + delay
