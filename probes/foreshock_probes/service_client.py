"""The HTTP client of the service's lease API.

A lease has a fencing token. The service refuses requests whose token is not the newest, so a worker whose lease expired
cannot overwrite the scores of its successor.
"""

from typing import Any, Literal

import httpx

from foreshock.api.leases import LeaseRecord
from foreshock.api.records import parse
from foreshock.client.connection import ServiceConnection
from foreshock.errors import Rejected, WrongService

FailKind = Literal["retry", "final", "skipped"]

TRANSFER_SECONDS = 300.0


class LeaseLostError(Rejected):
    """The lease is no longer held, or the job was deleted; the result must be dropped."""


class LeaseClient(ServiceConnection):
    """Calls of one worker; all raise ServiceError, those with a lease LeaseLostError if it is not held."""

    def take(self, wait_seconds: float, **offered: Any) -> LeaseRecord | None:
        """Return a lease on the next job for what is `offered`, None if there is none within `wait_seconds`."""
        body = {**offered, "wait": wait_seconds}
        response = self.request("POST", "/v1/leases", json_body=body, timeout_seconds=wait_seconds + 30.0)
        if response.status_code == 204:
            return None
        try:
            return parse(LeaseRecord, self.decoded(response))
        except (KeyError, TypeError, ValueError) as error:
            raise WrongService(
                f"{self.url} sent a lease of an unknown form; update the worker or the service: {error}"
            ) from error

    def on_lease(
        self,
        method: str,
        lease: LeaseRecord,
        action: str,
        *,
        headers: dict[str, str] | None = None,
        **options: Any,
    ) -> httpx.Response:
        """Send a request about a lease; an upload of the same bytes again has no effect."""
        path, own = f"/v1/leases/{lease.lease}/{action}", {"X-Foreshock-Lease-Token": str(lease.token)}
        try:
            return self.request(method, path, headers={**own, **(headers or {})}, **options)
        except Rejected as error:
            of_lease = error.status == 409 and "lease" in str(error.problem.get("type", ""))
            if of_lease or error.status in (404, 410):
                raise LeaseLostError(str(error), status=error.status, problem=error.problem) from error
            raise
