"""HTTP: the upload of a step's rollouts, as tokens or as statistics."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Path, Query, Request, Response, status
from starlette.concurrency import run_in_threadpool

from foreshock.api.runs import ShardReceipt
from foreshock.statistics_shards import MEDIA_TYPE as STATISTICS_MEDIA_TYPE
from foreshock_service.platform.context import Context, ServiceContext
from foreshock_service.platform.parameters import LARGEST_STEP, AttemptQuery, StepPath
from foreshock_service.platform.request_guards import PARQUET_MEDIA_TYPE
from foreshock_service.platform.security import Ingester, Principal
from foreshock_service.platform.uploads import PARQUET_BODY, STATISTICS_BODY, received_upload
from foreshock_service.runs.ingest import service
from foreshock_service.runs.ingest.service import ShardAddress
from foreshock_service.runs.runs.addresses import RunIdentifier

router = APIRouter(prefix="/v1/runs/{run}/steps/{step}", tags=["rollouts"])


_DUPLICATE: dict[int | str, dict[str, Any]] = {
    200: {"model": ShardReceipt, "description": "The same bytes were stored before"}
}
ShardPath = Annotated[int, Path(ge=0, le=LARGEST_STEP)]
Shards = Annotated[int, Query(ge=1, le=LARGEST_STEP, description="number of shards of the whole step")]


@router.put("/rollouts/{shard}", status_code=status.HTTP_201_CREATED, responses=_DUPLICATE, openapi_extra=PARQUET_BODY)
async def put_shard(
    run: RunIdentifier,
    step: StepPath,
    shard: ShardPath,
    request: Request,
    context: Context,
    principal: Ingester,
    response: Response,
    attempt: AttemptQuery = 1,
    shards: Shards = 1,
) -> ShardReceipt:
    """Store one shard of a step's rollouts: 201 if it is new, 200 for the same bytes again, 409 for other bytes."""
    return await _ingest(request, response, context, principal, ShardAddress(run, attempt, step, shard, shards))


@router.put(
    "/statistics/{shard}", status_code=status.HTTP_201_CREATED, responses=_DUPLICATE, openapi_extra=STATISTICS_BODY
)
async def put_statistics(
    run: RunIdentifier,
    step: StepPath,
    shard: ShardPath,
    request: Request,
    context: Context,
    principal: Ingester,
    response: Response,
    attempt: AttemptQuery = 1,
    shards: Shards = 1,
) -> ShardReceipt:
    """Store one shard as statistics over all its tokens, with some of its rollouts in full; answers as for rollouts.

    The body is made by `foreshock.statistics_shards`. A step may have shards of both kinds; one shard is of one kind.
    """
    address = ShardAddress(run, attempt, step, shard, shards, as_statistics=True)
    return await _ingest(request, response, context, principal, address)


async def _ingest(
    request: Request, response: Response, context: ServiceContext, principal: Principal, address: ShardAddress
) -> ShardReceipt:
    expected = STATISTICS_MEDIA_TYPE if address.as_statistics else PARQUET_MEDIA_TYPE
    # Before the body: a refused upload is not received.
    step_has_shards = await run_in_threadpool(service.check_address, context, principal, address)
    async with received_upload(request, context, expected) as upload:
        receipt = await context.uploads.run(
            service.ingest_shard, context, principal, address, upload, step_has_shards=step_has_shards
        )
    if receipt.status == "duplicate":
        response.status_code = status.HTTP_200_OK
    return receipt
