"""HTTP: leases, in the order of a worker's requests: lease, heartbeat, rollouts, and fail.

The requests that send results and complete the job are in `foreshock_service.replay.results`.
"""

import asyncio
import time
from functools import partial
from typing import Annotated, Literal

from fastapi import Header, Path, Request, Response, status
from fastapi.responses import FileResponse
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints
from starlette.background import BackgroundTask
from starlette.concurrency import run_in_threadpool

from foreshock.api.leases import LeaseRecord
from foreshock_service.platform import parameters, request_guards, security
from foreshock_service.platform.context import Context
from foreshock_service.replay.leases import service
from foreshock_service.replay.probes.schemas import Accelerator, EnvironmentName, PairKey, ScorerName


def _storable(text: str) -> str:
    """Replace NUL characters: a reason is often a traceback, and PostgreSQL stores no NUL in text."""
    return text.replace("\x00", "�")


class LeaseRequest(BaseModel):
    """A worker's request for a job that it can do."""

    worker: parameters.Name = Field(description="unique name of the worker")
    accelerator: Accelerator = "cpu"
    device_name: Annotated[str, StringConstraints(max_length=200, pattern=r"^[^\x00-\x1f\x7f]*$")] = ""
    environments: list[EnvironmentName] = Field(
        default_factory=list, max_length=64, description="the environments that the worker can score in"
    )
    scorers: list[ScorerName] = Field(min_length=1, max_length=64, description="all scorers that the worker offers")
    exact_pairs: list[PairKey] = Field(default=[], max_length=64, description="all exact pairs that the worker offers")
    wait: float = Field(default=0.0, ge=0, le=60, description="seconds to wait if there is no job")


class TokenBody(BaseModel):
    """The lease's fencing token."""

    model_config = ConfigDict(extra="forbid")

    token: int = Field(ge=1, lt=2**63)


class HeartbeatBody(TokenBody):
    """A sign of life."""

    doing: Annotated[str, Field(max_length=300), AfterValidator(_storable)] = Field(
        default="", description="what the job is trying at the moment"
    )


class FailBody(TokenBody):
    """The reason of a failed try. retry: another try may succeed; final: none can; skipped: the weights are gone."""

    reason: Annotated[str, Field(min_length=1, max_length=20_000), AfterValidator(_storable)]
    kind: Literal["retry", "final", "skipped"]


class HeartbeatRead(BaseModel):
    """The new end of the lease."""

    expires_at_us: int


class UploadReceipt(BaseModel):
    """A receipt: the uploaded values are `stored` now, or a `duplicate` of bytes that were stored before."""

    status: Literal["stored", "duplicate"]
    digest: str = Field(description="digest of the body's bytes: `sha256:…`")
    rollouts: int
    tokens: int = Field(description="response tokens")


router = parameters.api_router(prefix="/v1/leases", tags=["leases"])

LeaseIdentifier = Annotated[str, Path(max_length=100, pattern=r"^[A-Za-z0-9_]+$")]
LeaseToken = Annotated[int, Header(alias="X-Foreshock-Lease-Token", ge=1, lt=2**63)]
# Interval in seconds at which a waiting request looks for work.
_POLL_SECONDS = 0.5


@router.post(
    "",
    response_model=LeaseRecord,
    responses={204: {"description": "No job is queued that this worker can do"}},
)
async def request_lease(
    body: LeaseRequest, request: Request, context: Context, principal: security.Worker
) -> LeaseRecord | Response:
    """Lease the longest-queued job that this worker can do; waits up to `wait` seconds for one."""
    deadline = time.monotonic() + body.wait
    claim = partial(service.claim, context=context, principal=principal, request=body)
    while True:
        lease = await run_in_threadpool(context.database.write, claim)
        if lease is not None:
            return lease
        # While it sleeps, a request holds neither a thread nor a connection.
        while not await run_in_threadpool(service.is_work_waiting, context, principal, body):
            left = deadline - time.monotonic()
            if left <= 0 or context.stopping.is_set() or await request.is_disconnected():
                return Response(status_code=status.HTTP_204_NO_CONTENT)
            await asyncio.sleep(min(_POLL_SECONDS, left))
        if time.monotonic() >= deadline or await request.is_disconnected():
            return Response(status_code=status.HTTP_204_NO_CONTENT)


@router.post("/{lease}/heartbeat")
def heartbeat(
    lease: LeaseIdentifier, body: HeartbeatBody, context: Context, principal: security.Worker
) -> HeartbeatRead:
    """Extend the lease; 409 `lease-lost` means that another try has the job or the job has ended."""
    ends = context.database.write(lambda session: service.heartbeat(session, context, principal, lease, body))
    return HeartbeatRead(expires_at_us=ends)


@router.get(
    "/{lease}/rollouts",
    response_class=FileResponse,
    responses={
        200: {"content": {request_guards.PARQUET_MEDIA_TYPE: {"schema": {"type": "string", "format": "binary"}}}}
    },
)
def read_rollouts(
    lease: LeaseIdentifier, token: LeaseToken, context: Context, principal: security.Worker
) -> FileResponse:
    """Return the job's rollouts as Parquet."""
    path = service.write_job_rollouts(context, principal, lease, token)
    remove = BackgroundTask(path.unlink, missing_ok=True)
    return FileResponse(path, media_type=request_guards.PARQUET_MEDIA_TYPE, background=remove)


@router.post("/{lease}/fail", status_code=status.HTTP_204_NO_CONTENT)
def fail(lease: LeaseIdentifier, body: FailBody, context: Context, principal: security.Worker) -> None:
    """Report that the try failed. retry: the job is queued again or given up; final, skipped: the probe ends."""
    context.database.write(lambda session: service.fail(session, context, principal, lease, body))
