"""The sender's thread: it sends the items of the spool in order, and heartbeats between them.

Runs and attempts are registered when something of theirs is first sent. The answer to a delivery decides what follows
(`scope_of`):

    2xx             delivered
    service         everything waits and is sent again, with backoff
    run, item       the run's items, or this item, wait longer and longer; the others are sent meanwhile
    final           the item's file is kept as `.rejected`; if it is invalid (422), after a second try
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import socket
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

import httpx

from foreshock.client.connection import TRAINER_ANSWER_BYTES, ServiceConnection, wrong_service
from foreshock.client.deliveries import Delivery, Registration
from foreshock.client.reporting import Counters, DeliveryStatus, LogOnce
from foreshock.client.settings import ClientSettings
from foreshock.client.spool import Item, Spool
from foreshock.clock import now_us
from foreshock.errors import (
    HOST_NOT_ALLOWED,
    PROBLEM_TYPE_PREFIX,
    Rejected,
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
_HEARTBEAT_TIMEOUT_SECONDS = 10.0
_MOST_REMARKS, _LONGEST_REMARK = 20, 500

_MODES: Final = {"rate": "advice_mode", "correction": "correction_mode", "rollback": "rollback_mode"}
"""The fields of the levers' modes in the description of a run."""

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
        self.hook: LogOnce | None = None
        """The log of a framework's hook, whose messages are sent with each heartbeat."""
        self._spool = spool
        self._counters = counters
        self._log = log
        self._status = status
        self._after_delivery = after_delivery
        self._runs: dict[tuple[str, str], str] = {}
        self._attempts: dict[tuple[str, str, str], int] = {}
        self._may_adopt_other_keys = True
        # In the order of their failures.
        self._delays: dict[DelayKey, _Delay] = {}
        self._rejection: str | None = None
        self._heartbeat_seconds = settings.heartbeat_seconds
        self._next_heartbeat = math.inf
        self._name = f"{socket.gethostname()[:100]}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self._own: Registration | None = None
        self._shard: int | None = None
        self._reported: tuple[tuple[int, ...], list[str]] = (DeliveryStatus().counts, [])
        self._changed = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._send_all, name="foreshock-sender", daemon=True)

    def run_id(self, registration: Registration) -> str | None:
        """Return the run's id at the service, None until it is registered."""
        return self._runs.get(registration.run_identity)

    def attempt_number(self, registration: Registration) -> int | None:
        """Return the attempt's number, None until it is registered."""
        return self._attempts.get(registration.attempt_identity)

    @property
    def reason(self) -> str | None:
        """The newest reason for which items are not delivered now, or else were rejected; None without any."""
        delays = list(self._delays.values())
        return delays[-1].reason if delays else self._rejection

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def begin(self, registration: Registration, shard: int | None) -> None:
        """Send heartbeats for this attempt from now on; `shard` names the rank, if it is known."""
        self._own, self._shard = registration, shard
        # The registration itself is the first sign of life.
        self._next_heartbeat = time.monotonic() + self._heartbeat_seconds

    def wake(self) -> None:
        """Look for items now."""
        with self._changed:
            self._changed.notify_all()

    def wait(self, reached: Callable[[], bool], timeout_seconds: float) -> None:
        """Try everything at once, and wait until `reached()` or the timeout. Delays grow with the next failure."""
        deadline = time.monotonic() + timeout_seconds
        with self._changed:
            for delay in self._delays.values():
                delay.until = 0.0
            self._changed.notify_all()
            while not reached() and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(min(left, 0.2))

    def next(self) -> tuple[float, Item | None]:
        """Return the item to send next, and in how many seconds it can be sent."""
        seconds, item = self._spool.next(lambda each: max(self._seconds_until(each), self._seconds_until(each.run)))
        return max(seconds, self._seconds_until(None)), item

    def stop(self) -> None:
        """After the present request, send nothing but a report of losses."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()

    def join(self, deadline: float) -> None:
        """Wait for the end of the thread until `deadline` of `time.monotonic`; a disk that hangs is left alone."""
        self._thread.join(max(0.0, deadline - time.monotonic()))

    def _send_all(self) -> None:
        while self._wait_for_work():
            try:
                if self._heartbeat_at() <= time.monotonic():
                    self._send_heartbeat()
                self._send_next()
            except Exception as error:
                self._counters.add(internal_errors=1)
                self._log.exception(f"sending {type(error).__name__}", "sending failed and is retried", error)
                self._delay(None, f"sending failed: {error!r}")
            self.wake()
        is_reported = (self._status().counts, self._remarks()) == self._reported
        if None not in self._delays and not self.connection.is_interrupted and self._is_registered and not is_reported:
            self._send_heartbeat()
        self._spool.sync()

    def _wait_for_work(self) -> bool:
        """Wait until an item or a heartbeat is due; False when stopping."""
        with self._changed:
            while not self._stopping:
                left = min(self.next()[0], self._heartbeat_at() - time.monotonic(), _LONGEST_WAIT_SECONDS)
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
            response = self._request(delivery)
        except ServiceError as error:
            self._refused(item, delivery, error)
        else:
            self._delivered(item, delivery, response)

    def _request(self, delivery: Delivery) -> httpx.Response | None:
        """Send a delivery and return the answer, None for a registration. Raises ServiceError."""
        try:
            run, attempt = self._register(delivery.registration)
            return None if delivery.kind == "register" else self.connection.request(**delivery.request(run, attempt))
        except Rejected as error:
            if error.status == httpx.codes.NOT_FOUND:
                # The service does not know the run: its database may have been replaced.
                self._runs.pop(delivery.registration.run_identity, None)
                self._attempts.pop(delivery.registration.attempt_identity, None)
            raise

    def _register(self, registration: Registration) -> tuple[str, int]:
        """Return the run's id and the attempt's number, registering them if needed. Raises ServiceError."""
        run, attempt = self.run_id(registration), self.attempt_number(registration)
        asked = {lever: mode for lever, name in _MODES.items() if (mode := registration.run.get(name)) is not None}
        # A restart in the same process requests its run again if it asks for a mode.
        if run is None or (attempt is None and asked):
            run = self._get_or_create("/v1/runs", registration.run, registration.identified.run, "id")
            self._runs[registration.run_identity] = run
            self._warn_of_other_modes(registration.run["key"], run, asked)
        if attempt is None:
            path, at_us = f"/v1/runs/{run}/attempts", now_us()
            body, identity = registration.attempt_body(at_us), registration.identified.attempt_body(at_us)
            attempt = int(self._get_or_create(path, body, identity, "attempt"))
            self._attempts[registration.attempt_identity] = attempt
        return run, attempt

    def _warn_of_other_modes(self, key: object, run: str, asked: Mapping[str, object]) -> None:
        """Warn of each lever whose mode is another one than its trainer asks for: only a run's first start sets it."""
        try:
            advice = self.connection.get_json(f"/v1/runs/{run}/advice") if asked else {}
            served = {lever: advice[lever]["mode"] for lever in asked}
        except (ServiceError, KeyError, TypeError) as error:
            self._log.warning("modes", f"whether the run {key} has the modes that were asked for is unknown: {error}")
            return
        for lever, mode in asked.items():
            if served[lever] != mode:
                self._log.warning(
                    f"mode of {lever}",
                    f"{_MODES[lever]}={mode!r} is not used: the run {key} exists in mode {served[lever]!r}. Switch it "
                    f"on the run's page, or by PATCH /v1/runs/{{run}} with {_MODES[lever]}={mode!r}",
                )

    def _get_or_create(self, path: str, body: Mapping[str, Any], identity: Mapping[str, Any], field: str) -> str:
        """Return a field of what `body` gets or creates, without the fields that the service finds invalid."""
        try:
            answer = self.connection.decoded(self.connection.request("POST", path, json_body=dict(body)))
        except Rejected as error:
            if error.status != httpx.codes.UNPROCESSABLE_ENTITY or body == identity:
                raise
            refused = re.findall(r"\bbody\.(\w+)", str(error))
            named = [name for name in body if name not in identity and name in refused]
            what = " and ".join(named) or "all"
            self._log.warning(
                f"description {path} {what}", f"the service refused {what} of the run's description: left out: {error}"
            )
            kept = {name: value for name, value in body.items() if name not in named} if named else identity
            return self._get_or_create(path, kept, identity, field)
        found = answer.get(field) if isinstance(answer, dict) else None
        # It becomes a part of paths.
        kind, pattern = (int, r"\d{1,9}") if field == "attempt" else (str, r"[A-Za-z0-9_-]{1,64}")
        if type(found) is not kind or not re.fullmatch(pattern, str(found)):
            raise wrong_service(self.connection.url)
        return str(found)

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
        if delivery.kind == "state" and delivery.registration.same_attempt(self._own):
            self._next_heartbeat = math.inf
        if not self._stopping:
            self._after_delivery(delivery)

    def _refused(self, item: Item, delivery: Delivery, error: ServiceError) -> None:
        scope = scope_of(error, registering=self.attempt_number(delivery.registration) is None)
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

    @property
    def _is_registered(self) -> bool:
        return self._own is not None and self.attempt_number(self._own) is not None

    def _heartbeat_at(self) -> float:
        return self._next_heartbeat if self._is_registered else math.inf

    def _remarks(self) -> list[str]:
        messages = [] if self.hook is None else self.hook.messages
        return [each.replace("\x00", "")[:_LONGEST_REMARK] for each in messages[:_MOST_REMARKS]]

    def _send_heartbeat(self) -> None:
        """Tell that the trainer lives, what its client lost, and what its hook said. A failure is ignored."""
        own, status, remarks = self._own, self._status(), self._remarks()
        assert own is not None
        self._next_heartbeat = time.monotonic() + self._heartbeat_seconds
        body = {
            "shard": self._shard,
            **dict(zip(("undelivered", "rejected", "dropped", "invalid"), status.counts, strict=True)),
            "reason": None if status.reason is None else status.reason[:500],
            "remarks": remarks,
        }
        path = f"/v1/runs/{self.run_id(own)}/attempts/{self.attempt_number(own)}/clients/{self._name}"
        # A service that does not know the attempt may have got another database: the next delivery registers it there.
        with contextlib.suppress(ServiceError):
            self.connection.request("PUT", path, json_body=body, timeout_seconds=_HEARTBEAT_TIMEOUT_SECONDS)
            self._reported = (status.counts, remarks)


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
    status, is_host = error.status, error.problem.get("type") == PROBLEM_TYPE_PREFIX + HOST_NOT_ALLOWED
    if status is None or status in (401, 421, 502, 503, 504) or is_host:
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
