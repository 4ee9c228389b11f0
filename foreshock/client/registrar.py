"""Requests of deliveries: their runs and attempts are registered when something of theirs is first sent."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final, cast

import httpx

from foreshock.client.connection import ServiceConnection, wrong_service
from foreshock.client.deliveries import Delivery, Registration
from foreshock.client.reporting import LogOnce
from foreshock.clock import now_us
from foreshock.errors import Rejected, ServiceError

_MODES: Final = {"rate": "advice_mode", "correction": "correction_mode", "rollback": "rollback_mode"}
"""The fields of the levers' modes in the description of a run."""

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
        asked = {lever: mode for lever, name in _MODES.items() if (mode := registration.run.get(name)) is not None}
        # A restart in the same process requests its run again if it asks for a mode.
        if run is None or (attempt is None and asked):
            run = str(self._post("/v1/runs", registration.run, registration.identified.run, "id")["id"])
            self._runs[registration.run_identity] = run
            self._warn_of_other_modes(registration.run["key"], run, asked)
        if attempt is None:
            path, at_us = f"/v1/runs/{run}/attempts", now_us()
            body, identity = registration.attempt_body(at_us), registration.identified.attempt_body(at_us)
            attempt = int(self._post(path, body, identity, "attempt")["attempt"])
            self._attempts[registration.attempt_identity] = attempt
        return run, attempt

    def _warn_of_other_modes(self, key: object, run: str, asked: Mapping[str, object]) -> None:
        """Warn of each lever whose mode is another one than its trainer asks for: only a run's first start sets it."""
        try:
            advice = self._connection.get_json(f"/v1/runs/{run}/advice") if asked else {}
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

    def _post(self, path: str, body: Any, identity: Any, field: str) -> dict[str, Any]:
        """Get or create by `body`, without the fields of its description that the service finds invalid."""
        try:
            return self._created(path, body, field)
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
        return self._post(path, kept, identity, field)

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
