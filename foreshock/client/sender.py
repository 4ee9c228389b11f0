"""Sending of one delivery with the ids of its run and attempt, which are registered again if unknown."""

from __future__ import annotations

import httpx

from foreshock.client.connection import ServiceConnection
from foreshock.client.deliveries import Delivery
from foreshock.client.registrar import Registrar
from foreshock.errors import Rejected

__all__ = ["DeliverySender"]


class DeliverySender:
    """Sends deliveries over one connection; used by one thread."""

    def __init__(self, connection: ServiceConnection, registrar: Registrar) -> None:
        self._connection = connection
        self._registrar = registrar
        self.registering = False
        """True while, or if the last request failed while, run and attempt were registered."""

    def send(self, delivery: Delivery) -> httpx.Response | None:
        """Send a delivery and return the answer, None for a registration. Raises ServiceError."""
        known_before = self._registrar.run_id(delivery.registration) is not None
        try:
            return self._send_once(delivery)
        except Rejected as error:
            if error.status != httpx.codes.NOT_FOUND or not known_before:
                raise
        self._registrar.forget(delivery.registration)
        return self._send_once(delivery)

    def is_registered(self, delivery: Delivery) -> bool:
        """Return True if the ids of the delivery's run and attempt are known."""
        return self._registrar.attempt_number(delivery.registration) is not None

    def interrupt(self) -> None:
        """Make a request that is waiting in the sending thread fail at once. Safe from any thread."""
        self._connection.interrupt()

    def _send_once(self, delivery: Delivery) -> httpx.Response | None:
        self.registering = True
        run, attempt = self._registrar.register(self._connection, delivery.registration)
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
