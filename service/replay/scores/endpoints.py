"""HTTP: scores that a worker sends under its lease, and the completion that publishes them."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Query, Request, Response, status
from starlette.concurrency import run_in_threadpool

from foreshock_service.platform.context import Context
from foreshock_service.platform.schemas import LARGEST_STEP
from foreshock_service.platform.security import Worker
from foreshock_service.platform.uploads import PARQUET_BODY, received_upload
from foreshock_service.replay.leases.endpoints import LeaseIdentifier, LeaseToken
from foreshock_service.replay.leases.schemas import TokenBody, UploadReceipt
from foreshock_service.replay.probes.schemas import ScorerName, VariantName
from foreshock_service.replay.scores import service
from foreshock_service.replay.scores.schemas import ScoreAddress

router = APIRouter(prefix="/v1/leases", tags=["leases"])


@router.put(
    "/{lease}/scores/{shard}",
    status_code=status.HTTP_201_CREATED,
    responses={200: {"model": UploadReceipt, "description": "The same bytes were stored before"}},
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
) -> UploadReceipt:
    """Store one shard of a scorer's log-probs: 201 if it is new, 200 for the same bytes, 409 for other bytes."""
    address = ScoreAddress(lease, token, scorer, variant, shard)
    await run_in_threadpool(service.check_address, context, principal, address)
    async with received_upload(request, context) as upload:
        receipt = await context.uploads.run(service.store_scores, context, principal, address, upload)
    if receipt.status == "duplicate":
        response.status_code = status.HTTP_200_OK
    return receipt


@router.post("/{lease}/complete", status_code=status.HTTP_204_NO_CONTENT)
def complete(lease: LeaseIdentifier, body: TokenBody, context: Context, principal: Worker) -> None:
    """Publish the job's scores. The answer comes after the step's attribution was computed with them."""
    service.complete_job(context, principal, lease, body.token)
