"""Registration of runs and attempts: asks the service for their ids when something is first sent, and keeps them."""

from __future__ import annotations

from typing import Any

from foreshock.client.connection import ServiceConnection
from foreshock.client.deliveries import Registration
from foreshock.errors import Rejected

__all__ = ["Registrar"]


class Registrar:
    """Registers runs and attempts. Both calls are get-or-create, so repeating them is harmless."""

    def __init__(self) -> None:
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
            try:
                run = str(_post(connection, "/v1/runs", registration.run, "id"))
            except Rejected as error:
                if error.status in (404, 405):
                    # Every Foreshock service has POST /v1/runs.
                    raise connection.wrong_service() from error
                raise
            self._runs[registration.run_identity] = run
        identity = (*registration.run_identity, registration.attempt_key)
        attempt = self._attempts.get(identity)
        if attempt is None:
            attempt = int(_post(connection, f"/v1/runs/{run}/attempts", registration.attempt, "attempt"))
            self._attempts[identity] = attempt
        return run, attempt

    def forget(self, registration: Registration) -> None:
        """Register again next time: the service does not know the run (its database may have been replaced)."""
        self._runs.pop(registration.run_identity, None)
        self._attempts.pop((*registration.run_identity, registration.attempt_key), None)


def _post(connection: ServiceConnection, path: str, body: Any, field: str) -> Any:
    answer = connection.decoded(connection.request("POST", path, json_body=dict(body)))
    if not isinstance(answer, dict) or field not in answer:
        raise connection.wrong_service()
    return answer[field]
