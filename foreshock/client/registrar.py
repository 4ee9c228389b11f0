"""Who we are to the service: server ids of runs, numbers of attempts, asked for when something is first sent."""

from __future__ import annotations

from typing import Any

import httpx

from foreshock.client.connection import ServiceConnection
from foreshock.client.deliveries import Delivery, Registration
from foreshock.errors import ServiceError

__all__ = ["Registrar"]


class Registrar:
    """Registers runs and attempts (get-or-create, so asking again is harmless) and remembers the answers."""

    def __init__(self) -> None:
        self._runs: dict[tuple[str, str], str] = {}
        self._attempts: dict[tuple[str, str, str], int] = {}

    def run_id(self, registration: Registration) -> str | None:
        """The run's server id, None until the service has been reached."""
        return self._runs.get(registration.run_identity)

    def attempt_number(self, registration: Registration) -> int | None:
        """The attempt's number, None until the service has been reached."""
        return self._attempts.get((*registration.run_identity, registration.attempt_key))

    def register(self, connection: ServiceConnection, registration: Registration) -> tuple[str, int]:
        """The run's id and the attempt's number. Raises ServiceError."""
        run = self._runs.get(registration.run_identity)
        if run is None:
            try:
                run = str(self._post(connection, "/v1/runs", registration.run, "id"))
            except ServiceError as error:
                if error.status in (httpx.codes.NOT_FOUND, httpx.codes.METHOD_NOT_ALLOWED):
                    raise _not_foreshock(connection) from error
                raise
            self._runs[registration.run_identity] = run
        identity = (*registration.run_identity, registration.attempt_key)
        attempt = self._attempts.get(identity)
        if attempt is None:
            attempt = int(self._post(connection, f"/v1/runs/{run}/attempts", registration.attempt, "attempt"))
            self._attempts[identity] = attempt
        return run, attempt

    def forget(self, registration: Registration) -> None:
        """Ask again next time: the service does not know the run any more (another database, say)."""
        self._runs.pop(registration.run_identity, None)
        self._attempts.pop((*registration.run_identity, registration.attempt_key), None)

    def send(self, connection: ServiceConnection, delivery: Delivery) -> httpx.Response | None:
        """Send a delivery, registering first where that was not done; None for a mere registration.

        Raises ServiceError.
        """
        known_before = self.run_id(delivery.registration) is not None
        try:
            return self._send_once(connection, delivery)
        except ServiceError as error:
            if error.status != httpx.codes.NOT_FOUND or not known_before:
                raise
        self.forget(delivery.registration)
        return self._send_once(connection, delivery)

    def _send_once(self, connection: ServiceConnection, delivery: Delivery) -> httpx.Response | None:
        run, attempt = self.register(connection, delivery.registration)
        if not delivery.path:
            return None
        return connection.request(
            delivery.method,
            delivery.path.format(run=run, attempt=attempt),
            query={name: value.format(run=run, attempt=attempt) for name, value in delivery.query.items()},
            content=delivery.slices(),
            headers={"Content-Type": delivery.content_type, "Content-Length": str(len(delivery.body))},
        )

    @staticmethod
    def _post(connection: ServiceConnection, path: str, body: Any, field: str) -> Any:
        answer = connection.decoded(connection.request("POST", path, json_body=dict(body)))
        if not isinstance(answer, dict) or field not in answer:
            raise _not_foreshock(connection)
        return answer[field]


def _not_foreshock(connection: ServiceConnection) -> ServiceError:
    """The error of another server at the address, which may be Foreshock again tomorrow: nothing is final."""
    return ServiceError(f"{connection.url} answered, but not as Foreshock does: is the address right?")
