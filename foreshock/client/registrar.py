"""Requests of deliveries: their runs and attempts are registered when something of theirs is first sent."""

from __future__ import annotations

import re
from typing import Any, cast

import httpx

from foreshock.client.connection import ServiceConnection, wrong_service
from foreshock.client.deliveries import Delivery, Registration
from foreshock.client.reporting import LogOnce
from foreshock.clock import now_us
from foreshock.errors import Rejected

_IDENTIFIER = re.compile(r"[A-Za-z0-9_-]{1,64}")


class Registrar:
    """Sends deliveries, and registers their runs and attempts: both calls are get-or-create.

    `send` is for one thread; the ids can be read from any.
    """

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
        run, attempt = self._register(delivery.registration)
        if not delivery.path:
            return None
        delivery = delivery.of_attempt(attempt)
        return self._connection.request(
            delivery.method,
            delivery.path.format(run=run, attempt=attempt),
            query={name: value.format(run=run, attempt=attempt) for name, value in delivery.query.items()},
            content=delivery.slices(),
            headers={"Content-Type": delivery.content_type, "Content-Length": str(len(delivery.body))},
        )

    def _register(self, registration: Registration) -> tuple[str, int]:
        """Return the run's id and the attempt's number, registering them if needed. Raises ServiceError."""
        run, attempt = self.run_id(registration), self.attempt_number(registration)
        # A restart in the same process requests its run again if it asks for a mode.
        if run is None or (attempt is None and "advice_mode" in registration.run):
            answer = self._post("/v1/runs", registration.run, registration.identified.run, "id")
            run = self._runs[registration.run_identity] = str(answer["id"])
            self._warn_of_another_mode(registration, answer.get("advice_mode"))
        if attempt is None:
            path, at_us = f"/v1/runs/{run}/attempts", now_us()
            body, identity = registration.attempt_body(at_us), registration.identified.attempt_body(at_us)
            attempt = int(self._post(path, body, identity, "attempt")["attempt"])
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

    def _post(self, path: str, body: Any, identity: Any, field: str) -> dict[str, Any]:
        """Get or create by `body`; by `identity` alone if the service finds the description in `body` invalid."""
        try:
            return self._created(path, body, field)
        except Rejected as error:
            if error.status != httpx.codes.UNPROCESSABLE_ENTITY or body == identity:
                raise
            self._log.warning(
                f"description {path}", f"the service refused the run's description, which is left out: {error}"
            )
        return self._created(path, identity, field)

    def _created(self, path: str, body: Any, field: str) -> dict[str, Any]:
        answer: Any = self._connection.decoded(self._connection.request("POST", path, json_body=dict(body)))
        found = answer.get(field) if isinstance(answer, dict) else None
        # It becomes a part of paths.
        known = isinstance(found, str) and _IDENTIFIER.fullmatch(found[:100]) is not None
        if field == "attempt":
            known = type(found) is int and 0 <= found < 1 << 31
        if not known:
            raise wrong_service(self._connection.url)
        return cast(dict[str, Any], answer)
