"""The worker's side of the service's lease API, over HTTP.

A lease carries a fencing token: what is sent under a token that is no longer the newest is refused by the service, so a
worker that was thought dead can never overwrite what its successor did.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from foreshock.client.connection import ServiceConnection
from foreshock.errors import Rejected, WrongService

__all__ = [
    "Checkpoint",
    "FailKind",
    "Job",
    "Lease",
    "LeaseClient",
    "LeaseLostError",
    "RequestedScorer",
]

FailKind = Literal["retry", "final", "skipped"]

_TRANSFER_SECONDS = 300.0
_TOKEN_HEADER = "X-Foreshock-Lease-Token"
_PARQUET = "application/vnd.apache.parquet"
# The service keeps 2,000 characters, and puts a few words of its own in front.
_LONGEST_REASON = 1_800


class LeaseLostError(Rejected):
    """The lease is another worker's by now, or the job is gone: what was computed under it is not wanted."""


class _FromService(BaseModel):
    # A newer service may say more.
    model_config = ConfigDict(extra="ignore", frozen=True)


class RequestedScorer(_FromService):
    """A scorer of a job and its variant."""

    scorer: str
    variant: str = ""


class Checkpoint(_FromService):
    """The weights of a job, as announced by the run."""

    root: str
    path: str
    format: str = "hf_safetensors"
    digest: str
    step: int
    weights_version: int | None = None
    expires_at_us: int | None = None


class JobRollouts(_FromService):
    """How much a job is."""

    count: int
    tokens: int
    digest: str


class Job(_FromService):
    """What is to be scored, with which weights and scorers. `options` are by scorer."""

    id: str
    probe: str
    run: str
    attempt: int
    step: int
    kind: str = "exact"
    scorers: tuple[RequestedScorer, ...]
    options: dict[str, dict[str, Any]] = {}
    checkpoint: Checkpoint
    rollouts: JobRollouts


class Lease(_FromService):
    """A job that is ours until its lease ends. Times of the service are UTC microseconds."""

    lease: str
    token: int
    expires_at_us: int
    heartbeat_seconds: float
    job: Job


class LeaseClient:
    """Calls of one worker. Every method raises ServiceError; those on a lease raise LeaseLostError where it is lost.

    Use one client a thread.
    """

    def __init__(self, url: str, api_key: str | None) -> None:
        self._connection = ServiceConnection(url, api_key)

    def take(
        self, worker: str, accelerator: str, device_name: str, scorers: tuple[str, ...], wait_seconds: float
    ) -> Lease | None:
        """A lease on the next job that this worker can do, None where none came in `wait_seconds`."""
        body = {
            "worker": worker,
            "accelerator": accelerator,
            "device_name": device_name[:200],
            "scorers": list(scorers),
            "wait": wait_seconds,
        }
        response = self._connection.request("POST", "/v1/leases", json_body=body, timeout_seconds=wait_seconds + 30.0)
        if response.status_code == 204:
            return None
        try:
            return Lease.model_validate(self._connection.decoded(response))
        except ValidationError as error:
            raise WrongService(
                f"{self._connection.url} sent a lease that this release does not understand: {error}"
            ) from error

    def heartbeat(self, lease: Lease) -> None:
        """Keep the lease."""
        self._on_lease("POST", lease, "heartbeat", json_body={"token": lease.token}, timeout_seconds=10.0)

    def rollouts(self, lease: Lease) -> bytes:
        """The Parquet file of the rollouts to be scored."""
        response = self._on_lease("GET", lease, "rollouts", timeout_seconds=_TRANSFER_SECONDS)
        return bytes(response.content)

    def upload_scores(self, lease: Lease, requested: RequestedScorer, scores: bytes, shard: int = 0) -> None:
        """Store scores; the same bytes again are no change."""
        self._on_lease(
            "PUT",
            lease,
            f"scores/{shard}",
            query={"scorer": requested.scorer, "variant": requested.variant},
            content=scores,
            headers={"Content-Type": _PARQUET},
            timeout_seconds=_TRANSFER_SECONDS,
        )

    def complete(self, lease: Lease) -> None:
        """All scores are there."""
        self._on_lease("POST", lease, "complete", json_body={"token": lease.token})

    def fail(self, lease: Lease, reason: str, kind: FailKind) -> None:
        """There are no scores, and why. `kind`: "retry", "final" or "skipped" (the weights are gone)."""
        body = {"token": lease.token, "reason": _shortened(reason), "kind": kind}
        self._on_lease("POST", lease, "fail", json_body=body)

    def interrupt(self) -> None:
        """Make a call that waits in another thread fail at once."""
        self._connection.interrupt()

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def _on_lease(self, method: str, lease: Lease, action: str, **options: Any) -> Any:
        headers = {_TOKEN_HEADER: str(lease.token), **options.pop("headers", {})}
        try:
            return self._connection.request(method, f"/v1/leases/{lease.lease}/{action}", headers=headers, **options)
        except Rejected as error:
            if _lost(error):
                raise LeaseLostError(str(error), status=error.status, problem=error.problem) from error
            raise


def _lost(error: Rejected) -> bool:
    if error.status in (404, 410):
        return True
    return error.status == 409 and "lease" in str(error.problem.get("type", ""))


def _shortened(reason: str) -> str:
    """The reason within what the service keeps; the end of a long one (an engine's last words) tells most."""
    if len(reason) <= _LONGEST_REASON:
        return reason or "no reason was given"
    half = _LONGEST_REASON // 2 - 10
    return f"{reason[:half]}\n[…]\n{reason[-half:]}"
