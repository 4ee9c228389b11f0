"""Ingest an uploaded shard: decode and measure it in another process, store its tokens, commit it.

The catalogue row is the commit point. A crash before it leaves at most a file that no row names. After it the shard
counts, and its run is marked to be advanced. Every part can be repeated safely.
"""

import logging
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple

from fastapi import Path, Query, Request, Response, status
from sqlalchemy.orm import Session
from starlette.concurrency import run_in_threadpool

from foreshock.api.runs import ShardReceipt
from foreshock.clock import now_us
from foreshock.statistics_shards import MEDIA_TYPE as STATISTICS_MEDIA_TYPE
from foreshock_service.platform import parameters, problem, request_guards, security, uploads
from foreshock_service.platform.context import Context, ServiceContext
from foreshock_service.platform.database.tables import Shard
from foreshock_service.platform.decoding import worker
from foreshock_service.platform.store import removal, tokens
from foreshock_service.runs import (
    attempts,
    changes,
    diagnoses,
    due,
    events,
    run_endpoints,
    runs,
    shard_decoding,
    shards,
    steps,
)

router = parameters.api_router(prefix="/v1/runs/{run}/steps/{step}", tags=["rollouts"])

_DUPLICATE: dict[int | str, dict[str, Any]] = {
    200: {"model": ShardReceipt, "description": "The same bytes were stored before"}
}
ShardPath = Annotated[int, Path(ge=0, le=parameters.LARGEST_STEP)]
Shards = Annotated[int, Query(ge=1, le=4096, description="number of shards of the whole step")]
# The name of the route of shards that are sent as statistics.
_OF_STATISTICS = "put_statistics"
_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ShardAddress:
    """Shard `shard` of the `shards` of a step, sent as tokens or as statistics."""

    step_key: events.StepKey
    shard: int
    shards: int
    as_statistics: bool = False


class ShardConflict(problem.ProblemError, status=409, problem_type="shard-conflict"):
    """Other bytes are already stored under this attempt, step and shard."""


class _Stored(NamedTuple):
    status: Literal["stored", "duplicate"]
    shard: Shard


@router.put(
    "/rollouts/{shard}", status_code=status.HTTP_201_CREATED, responses=_DUPLICATE, openapi_extra=uploads.PARQUET_BODY
)
@router.put(
    "/statistics/{shard}",
    name=_OF_STATISTICS,
    description="Store one shard as statistics over all its tokens, with some of its rollouts in full; answers as for "
    "rollouts.\n\nThe body is made by `foreshock.statistics_shards`. A step may have shards of both kinds; one shard "
    "is of one kind.",
    status_code=status.HTTP_201_CREATED,
    responses=_DUPLICATE,
    openapi_extra=uploads.STATISTICS_BODY,
)
async def put_shard(
    run: run_endpoints.RunIdentifier,
    step: parameters.StepPath,
    shard: ShardPath,
    request: Request,
    context: Context,
    principal: security.Ingester,
    response: Response,
    attempt: parameters.AttemptQuery = 1,
    shards: Shards = 1,
) -> ShardReceipt:
    """Store one shard of a step's rollouts: 201 if it is new, 200 for the same bytes again, 409 for other bytes."""
    as_statistics = request.scope["route"].name == _OF_STATISTICS
    address = ShardAddress(events.StepKey(run, attempt, step), shard, shards, as_statistics)
    # Checked before the body, so that a refused upload is not received.
    await run_in_threadpool(check_address, context, principal, address)
    expected = STATISTICS_MEDIA_TYPE if as_statistics else request_guards.PARQUET_MEDIA_TYPE
    most_bytes = context.settings.max_body_bytes
    async with uploads.received_upload(request, context.uploads, context.store, most_bytes, expected) as upload:
        receipt = await context.uploads.run(ingest_shard, context, principal, address, upload)
    if receipt.status == "duplicate":
        response.status_code = status.HTTP_200_OK
    return receipt


def check_address(context: ServiceContext, principal: security.Principal, address: ShardAddress) -> None:
    """Check run, attempt, shard and number of shards of an upload before its body is read."""
    if address.shard >= address.shards:
        raise problem.InvalidRequest(
            f"shard must satisfy 0 <= shard < shards, got shard={address.shard}, shards={address.shards}"
        )
    key = address.step_key
    with context.database.read() as session:
        runs.get_run(session, principal, key.run_id)
        attempts.check_attempt(session, key.run_id, key.attempt)
        step = steps.find_step(session, key)
    if step is not None:
        steps.check_expected_shards(step, address.shards)


def ingest_shard(
    context: ServiceContext, principal: security.Principal, address: ShardAddress, upload: uploads.Upload
) -> ShardReceipt:
    """Store a received body as a shard; the same bytes again change nothing.

    Raises InvalidRolloutsError and LimitExceededError for an invalid body, ShardConflict if other bytes are stored,
    RunDeleted and AttemptNotFound. After any of these nothing is stored.
    """
    with context.database.read() as session:
        stored = _shard_before(session, address, upload.digest)
    if stored is None:
        name = tokens.shard_file_name(*address.step_key, address.shard, upload.digest)
        stored = _store_shard(context, principal, address, upload, name)
    elif stored.shard.tokens_purged_at_us is None:
        _restore(context, address, stored.shard, upload)
    shard = stored.shard
    return ShardReceipt(
        status=stored.status,
        digest=upload.digest,
        rollouts=shard.rollouts,
        tokens=shard.tokens,
        full_rollouts=shard.rollouts if shard.full_rollouts is None else shard.full_rollouts,
    )


def _shard_before(session: Session, address: ShardAddress, digest: str) -> _Stored | None:
    """Return the shard that was stored from these bytes, None if there is none; raise ShardConflict for other bytes."""
    key, shard = address.step_key, shards.find_shard(session, address.step_key, address.shard)
    if shard is None:
        return None
    if shard.digest != digest:
        raise ShardConflict(
            f"shard {address.shard} of step {key.step} in attempt {key.attempt} is stored with other bytes: "
            f"stored {shard.digest}, got {digest}; register a new attempt if the run was resumed"
        )
    return _Stored("duplicate", shard)


def _restore(context: ServiceContext, address: ShardAddress, shard: Shard, upload: uploads.Upload) -> None:
    if context.decoders.run(shard_decoding.is_intact, context.store.file(shard.file)):
        return
    decoded = _decode_to(context, address, upload, shard.file, None)

    def note(session: Session) -> None:
        found = shards.find_shard(session, address.step_key, address.shard)
        if found is not None:
            found.file_bytes = decoded.file_bytes

    context.database.write(note)
    _logger.warning("%s was gone or damaged, and is restored from the same bytes sent again", shard.file)


def _decode_to(
    context: ServiceContext, address: ShardAddress, upload: uploads.Upload, name: str, whole_step: events.StepKey | None
) -> shard_decoding.DecodedShard:
    """Decode and measure the upload, and publish its tokens in the store under `name`."""
    decode = shard_decoding.decode_statistics if address.as_statistics else shard_decoding.decode_shard
    temporary = context.store.temporary_file()
    try:
        decoded = context.decoders.run(
            decode, upload.path, temporary, worker.decode_limits(context.settings), whole_step
        )
        context.store.publish(upload.path if decoded.keeps_body else temporary, name)
    finally:
        temporary.unlink(missing_ok=True)
    return decoded


def _store_shard(
    context: ServiceContext, principal: security.Principal, address: ShardAddress, upload: uploads.Upload, name: str
) -> _Stored:
    whole_step = address.step_key if address.shards == 1 else None
    decoded = _decode_to(context, address, upload, name, whole_step)
    return uploads.commit_file(
        context.database, context.store, name,
        lambda session: commit_shard(session, context, principal, address, upload, decoded, name),
    )  # fmt: skip


def commit_shard(
    session: Session,
    context: ServiceContext,
    principal: security.Principal,
    address: ShardAddress,
    upload: uploads.Upload,
    decoded: shard_decoding.DecodedShard,
    file: str,
) -> _Stored:
    """Insert the catalogue row with the shard's statistics, and close the step if this is its only shard."""
    key, measured = address.step_key, decoded.measured
    run = runs.lock_run(session, principal, key.run_id)
    attempts.check_attempt(session, key.run_id, key.attempt)
    step = steps.find_step(session, key)
    stored = None if step is None else _shard_before(session, address, upload.digest)
    if stored is not None:
        return stored
    removal.check_not_taken(session, [file])
    if step is None:
        step = steps.open_step(session, key, address.shards)
    steps.check_expected_shards(step, address.shards)
    steps.count_shard(step, measured)
    changes.note_setup(session, step, measured.setup)
    if decoded.step is not None:
        shards.mark_closed(step)
    active_step = key.step if attempts.is_active(session, key) else None
    runs.note_upload(run, active_step, measured.rollouts, measured.tokens)
    # The step first: the rows of the shard have a foreign key to it.
    session.flush()
    shard = Shard(
        **key._asdict(),
        shard=address.shard,
        digest=upload.digest,
        body_bytes=upload.size,
        file=file,
        file_bytes=decoded.file_bytes,
        rollouts=measured.rollouts,
        tokens=measured.tokens,
        full_rollouts=measured.full_rollouts,
        full_tokens=measured.full_tokens,
        sampled_rollouts=measured.sampled_rollouts,
        rollout_set_digest=measured.rollout_set_digest,
        received_at_us=now_us(),
    )
    shards.add_shard(session, shard, measured, is_whole_step=decoded.step is not None)
    if decoded.step is not None:
        shards.store_fold(session, key, decoded.step)
        context.events.publish(session, events.StepClosed(*key))
    elif (
        step.received_shards >= step.expected_shards
        or step.closed_at_us is not None
        or diagnoses.awaits_shards(session, key.run_id)
    ):
        due.mark(session, key.run_id)
    return _Stored("stored", shard)
