"""HTTP: the upload of a step's rollouts."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Query, Request, Response, status
from starlette.concurrency import run_in_threadpool

from service.platform.context import Context
from service.platform.schemas import LARGEST_STEP, AttemptQuery, StepPath
from service.platform.security import Ingester
from service.platform.uploads import PARQUET_BODY, received_upload
from service.runs.ingest import service
from service.runs.ingest.schemas import ShardAddress, ShardReceipt
from service.runs.runs.addresses import RunIdentifier

router = APIRouter(prefix="/v1/runs/{run}/steps/{step}", tags=["rollouts"])


@router.put(
    "/rollouts/{shard}",
    status_code=status.HTTP_201_CREATED,
    responses={200: {"model": ShardReceipt, "description": "The same bytes were stored before"}},
    openapi_extra=PARQUET_BODY,
)
async def put_shard(
    run: RunIdentifier,
    step: StepPath,
    shard: Annotated[int, Path(ge=0, le=LARGEST_STEP)],
    request: Request,
    context: Context,
    principal: Ingester,
    response: Response,
    attempt: AttemptQuery = 1,
    shards: Annotated[int, Query(ge=1, le=LARGEST_STEP, description="number of shards of the whole step")] = 1,
) -> ShardReceipt:
    """Store one shard of a step's rollouts: 201 if it is new, 200 for the same bytes again, 409 for other bytes."""
    address = ShardAddress(run, attempt, step, shard, shards)
    step_has_shards = await run_in_threadpool(service.check_address, context, principal, address)
    async with received_upload(request, context) as upload:
        receipt = await run_in_threadpool(
            service.ingest_shard, context, principal, address, upload, step_has_shards=step_has_shards
        )
    if receipt.status == "duplicate":
        response.status_code = status.HTTP_200_OK
    return receipt
