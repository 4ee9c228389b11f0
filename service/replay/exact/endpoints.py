"""HTTP: exact divergences that a worker sends under its lease, and what is published of them."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Query, Request, Response, status
from starlette.concurrency import run_in_threadpool

from foreshock.scorers import EXACT_PAIRS
from foreshock_service.platform.context import Context
from foreshock_service.platform.schemas import LARGEST_STEP, ActiveOrAttempt, StepPath
from foreshock_service.platform.security import Reader, Worker
from foreshock_service.platform.uploads import PARQUET_BODY, received_upload
from foreshock_service.replay.exact import service, tokens
from foreshock_service.replay.exact.schemas import ExactAddress, ExactStepRead, ExactTokensRead
from foreshock_service.replay.leases.endpoints import LeaseIdentifier, LeaseToken
from foreshock_service.replay.leases.schemas import UploadReceipt
from foreshock_service.replay.probes.schemas import PairKey
from foreshock_service.runs.rollouts.tokens import LARGEST_POSITION, LONGEST_SAMPLE_ID
from foreshock_service.runs.runs.addresses import RunIdentifier

_DEFAULT_PAIR = next(iter(EXACT_PAIRS))

router = APIRouter(prefix="/v1", tags=["exact divergences"])


@router.put(
    "/leases/{lease}/exact/{shard}",
    status_code=status.HTTP_201_CREATED,
    responses={200: {"model": UploadReceipt, "description": "The same bytes were stored before"}},
    openapi_extra=PARQUET_BODY,
)
async def put_exact(
    lease: LeaseIdentifier,
    shard: Annotated[int, Path(ge=0, le=LARGEST_STEP)],
    token: LeaseToken,
    pair: Annotated[PairKey, Query()],
    request: Request,
    context: Context,
    principal: Worker,
    response: Response,
) -> UploadReceipt:
    """Store one shard of a pair's divergences: 201 if it is new, 200 for the same bytes, 409 for other bytes."""
    address = ExactAddress(lease, token, pair, shard)
    await run_in_threadpool(service.check_address, context, principal, address)
    async with received_upload(request, context) as upload:
        receipt = await context.uploads.run(service.store_exact, context, principal, address, upload)
    if receipt.status == "duplicate":
        response.status_code = status.HTTP_200_OK
    return receipt


@router.get("/runs/{run}/steps/{step}/exact")
def read_exact(
    run: RunIdentifier, step: StepPath, context: Context, principal: Reader, attempt: ActiveOrAttempt = None
) -> ExactStepRead:
    """Return the exact divergences of the step's pairs; 404 `exact-not-found` if none are published."""
    with context.database.read() as session:
        return service.read_exact_step(session, principal, run, step, attempt)


@router.get("/runs/{run}/steps/{step}/exact/tokens")
def read_exact_tokens(
    run: RunIdentifier,
    step: StepPath,
    context: Context,
    principal: Reader,
    attempt: ActiveOrAttempt = None,
    pair: Annotated[PairKey, Query()] = _DEFAULT_PAIR,
    worst: Annotated[int, Query(ge=1, le=1000, description="number of tokens, largest KL(μ‖π) first")] = 20,
    sample_id: Annotated[
        str | None, Query(max_length=LONGEST_SAMPLE_ID, description="return all tokens of this rollout instead")
    ] = None,
    from_position: Annotated[int, Query(ge=0, le=LARGEST_POSITION, description="first, of a rollout")] = 0,
    to_position: Annotated[int, Query(ge=0, le=LARGEST_POSITION, description="last, of a rollout")] = LARGEST_POSITION,
) -> ExactTokensRead:
    """Return the tokens with the largest divergences, or one rollout token by token."""
    query = tokens.ExactTokenQuery(run, step, attempt, pair, worst, sample_id, from_position, to_position)
    return tokens.read_exact_tokens(context, principal, query)
