"""Heartbeats: they tell that a trainer lives, what its client could not deliver, and what its hook refused."""

from __future__ import annotations

import math
import os
import socket
import time
import uuid

import httpx

from foreshock.client.connection import ServiceConnection
from foreshock.client.deliveries import Delivery, Registration
from foreshock.client.registrar import Registrar
from foreshock.client.reporting import DeliveryStatus, LogOnce
from foreshock.errors import Rejected, ServiceError

_TIMEOUT_SECONDS = 10.0
_MOST_REMARKS, _LONGEST_REMARK = 20, 500


class Heartbeats:
    """Sends heartbeats for the newest started attempt of this client, until its run is finished."""

    def __init__(self, connection: ServiceConnection, registrar: Registrar, *, interval_seconds: float) -> None:
        self._connection = connection
        self._registrar = registrar
        self._interval = interval_seconds
        self._registration: Registration | None = None
        self._next = 0.0
        self._client = f"{socket.gethostname()[:100]}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self._shard: int | None = None
        self._reported: tuple[tuple[int, ...], list[str]] = (DeliveryStatus().counts, [])
        self._hook: LogOnce | None = None

    def start(self, registration: Registration, shard: int | None) -> None:
        """Send heartbeats for this run and attempt from now on; `shard` names the rank, if it is known."""
        self._shard = shard
        self._registration = registration
        # The registration itself is the first sign of life.
        self._next = time.monotonic() + self._interval

    def tell_remarks_of(self, hook: LogOnce) -> None:
        """Send with each heartbeat what the log of a framework's hook has said."""
        self._hook = hook

    def due_at(self) -> float:
        """Return the `time.monotonic` of the next heartbeat; infinity if there is no run to send it for."""
        return self._next if self._is_registered() else math.inf

    def note_delivery(self, delivery: Delivery) -> None:
        """Stop when the end of this attempt was delivered."""
        own = self._registration
        if own and delivery.kind == "state" and delivery.registration.attempt_identity == own.attempt_identity:
            self._next = math.inf

    def send_last(self, status: DeliveryStatus) -> None:
        """Report losses and remarks that no heartbeat has reported."""
        if self._is_registered() and (status.counts, self._remarks()) != self._reported:
            self.send(status)

    def send(self, status: DeliveryStatus) -> None:
        """Send one heartbeat. A failure is ignored: the next one follows."""
        registration = self._registration
        assert registration is not None
        self._next = time.monotonic() + self._interval
        remarks = self._remarks()
        run, attempt = self._registrar.run_id(registration), self._registrar.attempt_number(registration)
        body = {
            "shard": self._shard,
            **dict(zip(("undelivered", "rejected", "dropped", "invalid"), status.counts, strict=True)),
            "reason": None if status.reason is None else status.reason[:500],
            "remarks": remarks,
        }
        path = f"/v1/runs/{run}/attempts/{attempt}/clients/{self._client}"
        try:
            self._connection.request("PUT", path, json_body=body, timeout_seconds=_TIMEOUT_SECONDS)
            self._reported = (status.counts, remarks)
        except Rejected as error:
            # A service that does not know the attempt (404) may have got another database: the next delivery registers
            # the attempt there, and the heartbeats go on. A deleted run needs none (410).
            if error.status == httpx.codes.GONE:
                self._registration = None
        except ServiceError:
            pass

    def _remarks(self) -> list[str]:
        messages = [] if self._hook is None else self._hook.messages
        return [each.replace("\x00", "")[:_LONGEST_REMARK] for each in messages[:_MOST_REMARKS]]

    def _is_registered(self) -> bool:
        registration = self._registration
        return registration is not None and self._registrar.attempt_number(registration) is not None
