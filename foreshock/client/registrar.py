"""Requests of deliveries, and heartbeats between them, which also report what the client could not deliver.

The runs and attempts of deliveries are registered when something of theirs is first sent. `scope_of` says what a failed
request concerns, which decides when it is sent again.
"""

from __future__ import annotations

import math
import os
import re
import socket
import time
import uuid
from typing import Any, Literal, cast

import httpx

from foreshock.client.connection import ServiceConnection, wrong_service
from foreshock.client.deliveries import Delivery, Registration
from foreshock.client.reporting import DeliveryStatus, LogOnce
from foreshock.clock import now_us
from foreshock.errors import HOST_NOT_ALLOWED, PROBLEM_TYPE_PREFIX, Rejected, ServiceError, ServiceUnavailable

Scope = Literal["service", "run", "item", "final"]

_HEARTBEAT_SECONDS = 10.0
"""Timeout of a heartbeat."""

_IDENTIFIER = re.compile(r"[A-Za-z0-9_-]{1,64}")
_HOST_NOT_ALLOWED = PROBLEM_TYPE_PREFIX + HOST_NOT_ALLOWED


class Registrar:
    """Sends deliveries, and registers their runs and attempts: both calls are get-or-create. Safe from any thread."""

    def __init__(self, connection: ServiceConnection, log: LogOnce) -> None:
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

    def send(self, delivery: Delivery, connection: ServiceConnection | None = None) -> httpx.Response | None:
        """Send a delivery and return the answer, None for a registration. Raises ServiceError.

        `connection`: another one than the registrar's own, for another thread.
        """
        connection = connection or self._connection
        registration = delivery.registration
        known_before = self.run_id(registration) is not None
        try:
            return self._send_once(delivery, connection)
        except Rejected as error:
            if error.status != httpx.codes.NOT_FOUND or not known_before:
                raise
        # The service does not know the run: its database may have been replaced.
        self._runs.pop(registration.run_identity, None)
        self._attempts.pop(registration.attempt_identity, None)
        return self._send_once(delivery, connection)

    def _send_once(self, delivery: Delivery, connection: ServiceConnection) -> httpx.Response | None:
        run, attempt = self._register(delivery.registration, connection)
        if not delivery.path:
            return None
        delivery = delivery.of_attempt(attempt)
        return connection.request(
            delivery.method,
            delivery.path.format(run=run, attempt=attempt),
            query={name: value.format(run=run, attempt=attempt) for name, value in delivery.query.items()},
            content=delivery.slices(),
            headers={"Content-Type": delivery.content_type, "Content-Length": str(len(delivery.body))},
        )

    def _register(self, registration: Registration, connection: ServiceConnection) -> tuple[str, int]:
        """Return the run's id and the attempt's number, registering them if needed. Raises ServiceError."""
        run, attempt = self.run_id(registration), self.attempt_number(registration)
        # A restart in the same process requests its run again if it asks for a mode.
        if run is None or (attempt is None and "advice_mode" in registration.run):
            answer = self._post(connection, "/v1/runs", registration.run, registration.identified.run, "id")
            run = self._runs[registration.run_identity] = str(answer["id"])
            self._warn_of_another_mode(registration, answer.get("advice_mode"))
        if attempt is None:
            path, at_us = f"/v1/runs/{run}/attempts", now_us()
            body, identity = registration.attempt_body(at_us), registration.identified.attempt_body(at_us)
            attempt = int(self._post(connection, path, body, identity, "attempt")["attempt"])
            self._attempts[registration.attempt_identity] = attempt
        return run, attempt

    def _warn_of_another_mode(self, registration: Registration, served: object) -> None:
        """Warn if the run has another mode than its trainer asks for: only the first start of a run sets it."""
        asked = registration.run.get("advice_mode")
        if asked is not None and served is not None and asked != served:
            self._log.warning(
                "advice mode",
                f"advice_mode={asked!r} is not used: the run {registration.run['key']} exists in mode {served!r}. "
                f"Switch it on the run's page, or by PATCH /v1/runs/{{run}} with advice_mode={asked!r}",
            )

    def _post(self, connection: ServiceConnection, path: str, body: Any, identity: Any, field: str) -> dict[str, Any]:
        """Get or create by `body`; by `identity` alone if the service finds the description in `body` invalid."""
        try:
            return _created(connection, path, body, field)
        except Rejected as error:
            if path == "/v1/runs" and error.status in (httpx.codes.NOT_FOUND, httpx.codes.METHOD_NOT_ALLOWED):
                # Every Foreshock service has POST /v1/runs.
                raise wrong_service(connection.url) from error
            if error.status != httpx.codes.UNPROCESSABLE_ENTITY or body == identity:
                raise
            self._log.warning(
                f"description {path}", f"the service refused the run's description, which is left out: {error}"
            )
        return _created(connection, path, identity, field)


def _created(connection: ServiceConnection, path: str, body: Any, field: str) -> dict[str, Any]:
    answer: Any = connection.decoded(connection.request("POST", path, json_body=dict(body)))
    found = answer.get(field) if isinstance(answer, dict) else None
    # It becomes a part of paths.
    known = isinstance(found, str) and _IDENTIFIER.fullmatch(found[:100]) is not None
    if field == "attempt":
        known = type(found) is int and 0 <= found < 1 << 31
    if not known:
        raise wrong_service(connection.url)
    return cast(dict[str, Any], answer)


class Heartbeats:
    """Tells the service that a trainer lives, and what its client could not deliver, until its run is finished."""

    def __init__(self, connection: ServiceConnection, registrar: Registrar, *, interval_seconds: float) -> None:
        self._connection = connection
        self._registrar = registrar
        self._interval = interval_seconds
        self._registration: Registration | None = None
        self._next = 0.0
        self._client = f"{socket.gethostname()[:100]}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self._shard: int | None = None
        self._reported = DeliveryStatus()

    def start(self, registration: Registration, shard: int | None) -> None:
        """Send heartbeats for this run and attempt from now on; `shard` names the rank, if it is known."""
        self._shard = shard
        self._registration = registration
        # The registration itself is the first sign of life.
        self._next = time.monotonic() + self._interval

    def due_at(self) -> float:
        """Return the `time.monotonic` of the next heartbeat; infinity if there is no run to send it for."""
        return self._next if self._is_registered() else math.inf

    def note_delivery(self, delivery: Delivery) -> None:
        """Stop when the end of this attempt was delivered."""
        own = self._registration
        if own and delivery.kind == "state" and delivery.registration.attempt_identity == own.attempt_identity:
            self._next = math.inf

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
            self._connection.request("PUT", path, json_body=body, timeout_seconds=_HEARTBEAT_SECONDS)
            self._reported = status
        except Rejected as error:
            # A service that does not know the attempt (404) may have got another database: the next delivery registers
            # the attempt there, and the heartbeats go on. A deleted run needs none (410).
            if error.status == httpx.codes.GONE:
                self._registration = None
        except ServiceError:
            pass

    def _is_registered(self) -> bool:
        registration = self._registration
        return registration is not None and self._registrar.attempt_number(registration) is not None


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
