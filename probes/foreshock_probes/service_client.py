"""The HTTP client of the service's lease API.

A lease has a fencing token. The service refuses requests whose token is not the newest, so a worker whose lease expired
cannot overwrite the scores of its successor.
"""

from collections.abc import Sequence
from typing import Any, Literal

from foreshock.api.leases import LeaseRecord
from foreshock.api.probes import ScorerRecord
from foreshock.api.records import parse
from foreshock.client.connection import ServiceConnection
from foreshock.errors import Rejected, WrongService

FailKind = Literal["retry", "final", "skipped"]

_TRANSFER_SECONDS = 300.0
_TOKEN_HEADER = "X-Foreshock-Lease-Token"
_PARQUET = "application/vnd.apache.parquet"
# The service keeps 2,000 characters, including a prefix of its own.
_LONGEST_REASON = 1_800
_LONGEST_DOING = 300


class LeaseLostError(Rejected):
    """The lease is no longer held, or the job was deleted; the result must be dropped."""


class LeaseClient:
    """Calls of one worker. All methods raise ServiceError; those with a lease raise LeaseLostError if it is not held.

    Use one client per thread.
    """

    def __init__(self, url: str, api_key: str | None) -> None:
        self._connection = ServiceConnection(url, api_key)

    def take(
        self,
        worker: str,
        accelerator: str,
        device_name: str,
        scorers: tuple[str, ...],
        wait_seconds: float,
        environments: Sequence[str] = (),
        exact_pairs: Sequence[str] = (),
    ) -> LeaseRecord | None:
        """Return a lease on the next job for these scorers or pairs, None if there is none within `wait_seconds`.

        `environments` are the names of the environments in which this worker can score.
        """
        body = {
            "worker": worker,
            "accelerator": accelerator,
            "device_name": device_name[:200],
            "environments": list(environments),
            "scorers": list(scorers),
            "exact_pairs": list(exact_pairs),
            "wait": wait_seconds,
        }
        response = self._connection.request("POST", "/v1/leases", json_body=body, timeout_seconds=wait_seconds + 30.0)
        if response.status_code == 204:
            return None
        try:
            return parse(LeaseRecord, self._connection.decoded(response))
        except (KeyError, TypeError, ValueError) as error:
            raise WrongService(
                f"{self._connection.url} sent a lease of an unknown form; update the worker or the service: {error}"
            ) from error

    def heartbeat(self, lease: LeaseRecord, doing: str = "") -> None:
        """Extend the lease; `doing`: the job's current experiment."""
        body = {"token": lease.token, **({"doing": doing[:_LONGEST_DOING]} if doing else {})}
        self._on_lease("POST", lease, "heartbeat", json_body=body, timeout_seconds=10.0)

    def rollouts(self, lease: LeaseRecord) -> bytes:
        """Return the job's rollouts as a Parquet file."""
        response = self._on_lease("GET", lease, "rollouts", timeout_seconds=_TRANSFER_SECONDS)
        return bytes(response.content)

    def upload_scores(self, lease: LeaseRecord, requested: ScorerRecord, scores: bytes) -> None:
        """Upload scores. Uploading the same bytes again has no effect."""
        query = {"scorer": requested.scorer, "variant": requested.variant}
        headers = {"Content-Type": _PARQUET}
        self._on_lease(
            "PUT", lease, "scores", query=query, content=scores, headers=headers, timeout_seconds=_TRANSFER_SECONDS
        )

    def upload_document(self, lease: LeaseRecord, path: str, document: dict[str, Any]) -> None:
        """Upload a job's result that is a document. A document that is uploaded again replaces the first one."""
        self._on_lease("PUT", lease, path, json_body=document)

    def complete(self, lease: LeaseRecord) -> None:
        """Mark the job as complete; its scores, or the result of its search or comparison, must have been uploaded."""
        self._on_lease("POST", lease, "complete", json_body={"token": lease.token})

    def fail(self, lease: LeaseRecord, reason: str, kind: FailKind) -> None:
        """Mark the job as failed with `reason`. `kind`: "retry", "final", or "skipped" if the weights are missing."""
        body = {"token": lease.token, "reason": _shortened(reason), "kind": kind}
        self._on_lease("POST", lease, "fail", json_body=body)

    def interrupt(self) -> None:
        """Make a pending call of another thread fail immediately."""
        self._connection.interrupt()

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def _on_lease(self, method: str, lease: LeaseRecord, action: str, **options: Any) -> Any:
        headers = {_TOKEN_HEADER: str(lease.token), **options.pop("headers", {})}
        try:
            return self._connection.request(method, f"/v1/leases/{lease.lease}/{action}", headers=headers, **options)
        except Rejected as error:
            if _is_lease_lost(error):
                raise LeaseLostError(str(error), status=error.status, problem=error.problem) from error
            raise


def _is_lease_lost(error: Rejected) -> bool:
    if error.status in (404, 410):
        return True
    return error.status == 409 and "lease" in str(error.problem.get("type", ""))


def _shortened(reason: str) -> str:
    """Shorten the reason to the service's limit; of a long one keep the end, which has the engine's last output."""
    if len(reason) <= _LONGEST_REASON:
        return reason or "no reason was given"
    half = _LONGEST_REASON // 2 - 10
    return f"{reason[:half]}\n[…]\n{reason[-half:]}"
