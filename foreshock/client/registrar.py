"""Registration of runs and attempts: asks the service for their ids when something is first sent, and keeps them."""

from __future__ import annotations

from typing import Any

import httpx

from foreshock.client.connection import ServiceConnection, wrong_service
from foreshock.client.deliveries import Registration
from foreshock.client.log_once import LogOnce
from foreshock.errors import Rejected

__all__ = ["Registrar"]


class Registrar:
    """Registers runs and attempts. Both calls are get-or-create, so repeating them is harmless."""

    def __init__(self, log: LogOnce) -> None:
        self._log = log
        self._runs: dict[tuple[str, str], str] = {}
        self._attempts: dict[tuple[str, str, str], int] = {}

    def run_id(self, registration: Registration) -> str | None:
        """Return the run's id at the service, None until it is registered."""
        return self._runs.get(registration.run_identity)

    def attempt_number(self, registration: Registration) -> int | None:
        """Return the attempt's number, None until it is registered."""
        return self._attempts.get((*registration.run_identity, registration.attempt_key))

    def register(self, connection: ServiceConnection, registration: Registration) -> tuple[str, int]:
        """Return the run's id and the attempt's number, registering them if needed. Raises ServiceError."""
        run = self._runs.get(registration.run_identity)
        if run is None:
            run = str(self._post(connection, "/v1/runs", registration.run, registration.identified.run, "id"))
            self._runs[registration.run_identity] = run
        identity = (*registration.run_identity, registration.attempt_key)
        attempt = self._attempts.get(identity)
        if attempt is None:
            path = f"/v1/runs/{run}/attempts"
            attempt = int(
                self._post(connection, path, registration.attempt, registration.identified.attempt, "attempt")
            )
            self._attempts[identity] = attempt
        return run, attempt

    def forget(self, registration: Registration) -> None:
        """Register again next time: the service does not know the run (its database may have been replaced)."""
        self._runs.pop(registration.run_identity, None)
        self._attempts.pop((*registration.run_identity, registration.attempt_key), None)

    def _post(self, connection: ServiceConnection, path: str, body: Any, identity: Any, field: str) -> Any:
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


def _created(connection: ServiceConnection, path: str, body: Any, field: str) -> Any:
    answer = connection.decoded(connection.request("POST", path, json_body=dict(body)))
    if not isinstance(answer, dict) or field not in answer:
        raise wrong_service(connection.url)
    return answer[field]
