"""HTTP: leases, as workers use them: lease, rollouts, scores, complete or fail; and heartbeats beside."""

from __future__ import annotations

import asyncio
import time
from typing import Annotated

from fastapi import APIRouter, Header, Path, Query, Request, Response, status
from fastapi.responses import FileResponse
from starlette.background import BackgroundTask
from starlette.concurrency import run_in_threadpool

from service.platform.context import Context
from service.platform.guards import PARQUET_MEDIA_TYPE
from service.platform.schemas import LARGEST_STEP
from service.platform.security import Worker
from service.platform.uploads import PARQUET_BODY, received_upload
from service.replay.attribution.service import try_to_compute
from service.replay.leases import service
from service.replay.leases.schemas import FailBody, HeartbeatRead, LeaseRead, LeaseRequest, TokenBody
from service.replay.probes.schemas import ScorerName, VariantName
from service.replay.scores import service as scores
from service.replay.scores.schemas import ScoreAddress, ScoreReceipt
from service.runs.step_key import StepKey

router = APIRouter(prefix="/v1/leases", tags=["leases"])

LeaseIdentifier = Annotated[str, Path(max_length=100, pattern=r"^[A-Za-z0-9_]+$")]
LeaseToken = Annotated[int, Header(alias="X-Foreshock-Lease-Token", ge=1, lt=2**63)]
_LOOK_SECONDS = 0.5


@router.post(
    "",
    response_model=LeaseRead,
    responses={204: {"description": "Nothing to do that this worker can do"}},
)
async def request_lease(
    body: LeaseRequest, request: Request, context: Context, principal: Worker
) -> LeaseRead | Response:
    """The job that waits longest of those that this worker can do; waits up to `wait` seconds for one."""
    ends = time.monotonic() + body.wait
    while True:
        lease = await run_in_threadpool(service.claim, context, principal, body)
        if lease is not None:
            return lease
        # Between looks neither a thread nor a connection is held.
        while not await run_in_threadpool(service.is_work_waiting, context, principal, body):
            left = ends - time.monotonic()
            if left <= 0 or await request.is_disconnected():
                return Response(status_code=status.HTTP_204_NO_CONTENT)
            await asyncio.sleep(min(_LOOK_SECONDS, left))
        if time.monotonic() >= ends or await request.is_disconnected():
            return Response(status_code=status.HTTP_204_NO_CONTENT)


@router.post("/{lease}/heartbeat")
def heartbeat(lease: LeaseIdentifier, body: TokenBody, context: Context, principal: Worker) -> HeartbeatRead:
    """Keep the lease; 409 `lease-lost` says that the job is another's by now."""
    return HeartbeatRead(expires_at_us=service.heartbeat(context, principal, lease, body.token))


@router.get(
    "/{lease}/rollouts",
    response_class=FileResponse,
    responses={200: {"content": {PARQUET_MEDIA_TYPE: {"schema": {"type": "string", "format": "binary"}}}}},
)
def read_rollouts(lease: LeaseIdentifier, token: LeaseToken, context: Context, principal: Worker) -> FileResponse:
    """The job's rollouts as Parquet."""
    path = scores.write_job_rollouts(context, principal, lease, token)
    remove = BackgroundTask(path.unlink, missing_ok=True)
    return FileResponse(path, media_type=PARQUET_MEDIA_TYPE, background=remove)


@router.put(
    "/{lease}/scores/{shard}",
    status_code=status.HTTP_201_CREATED,
    responses={200: {"model": ScoreReceipt, "description": "The same bytes were stored before"}},
    openapi_extra=PARQUET_BODY,
)
async def put_scores(
    lease: LeaseIdentifier,
    shard: Annotated[int, Path(ge=0, le=LARGEST_STEP)],
    token: LeaseToken,
    scorer: Annotated[ScorerName, Query()],
    request: Request,
    context: Context,
    principal: Worker,
    response: Response,
    variant: Annotated[VariantName, Query()] = "",
) -> ScoreReceipt:
    """Store one shard of a scorer's log-probs: 201 where it is new, 200 for the same bytes, 409 for other bytes."""
    address = ScoreAddress(lease, token, scorer, variant, shard)
    await run_in_threadpool(scores.check_address, context, principal, address)
    async with received_upload(request, context) as upload:
        receipt = await run_in_threadpool(scores.store_scores, context, principal, address, upload)
    if receipt.status == "duplicate":
        response.status_code = status.HTTP_200_OK
    return receipt


@router.post("/{lease}/complete", status_code=status.HTTP_204_NO_CONTENT)
def complete(lease: LeaseIdentifier, body: TokenBody, context: Context, principal: Worker) -> None:
    """The job is done: its scores count from now on, and the step's attribution is computed with them."""
    probe = scores.publish_job(context, principal, lease, body.token)
    try_to_compute(context, StepKey(probe.run_id, probe.attempt, probe.step))


@router.post("/{lease}/fail", status_code=status.HTTP_204_NO_CONTENT)
def fail(lease: LeaseIdentifier, body: FailBody, context: Context, principal: Worker) -> None:
    """The job was not done. retry: queue it again (or give up); final, skipped: end the probe with this reason."""
    service.fail(context, principal, lease, body)
