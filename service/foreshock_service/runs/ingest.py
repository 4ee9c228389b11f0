"""Ingest an uploaded shard: decode and measure it in another process, store its tokens, commit it.

The catalogue row is the commit point. A crash before it leaves at most a file that no row names. After it the shard
counts, and its run is marked to be advanced. Every part can be repeated safely.
"""

import logging
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import Path, Query, Request, Response, status
from sqlalchemy.orm import Session
from starlette.concurrency import run_in_threadpool

from foreshock.api.runs import ShardReceipt
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
class ArrivingShard:
    """Shard `shard` of the `shards` of a step, sent as tokens or as statistics, and who sends it."""

    context: ServiceContext
    principal: security.Principal
    key: events.StepKey
    shard: int
    shards: int
    as_statistics: bool


class ShardConflict(problem.ProblemError, status=409, problem_type="shard-conflict"):
    """Other bytes are already stored under this attempt, step and shard."""


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
    run: runs.RunIdentifier,
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
    arriving = ArrivingShard(context, principal, events.StepKey(run, attempt, step), shard, shards, as_statistics)
    # Checked before the body, so that a refused upload is not received.
    await run_in_threadpool(_check, arriving)
    expected = STATISTICS_MEDIA_TYPE if as_statistics else request_guards.PARQUET_MEDIA_TYPE
    most_bytes = context.settings.max_body_bytes
    async with uploads.received_upload(request, context.uploads, context.store, most_bytes, expected) as upload:
        receipt = await context.uploads.run(ingest_shard, arriving, upload)
    if receipt.status == "duplicate":
        response.status_code = status.HTTP_200_OK
    return receipt


def _check(arriving: ArrivingShard) -> None:
    """Check run, attempt, shard and number of shards of an upload before its body is read."""
    if arriving.shard >= arriving.shards:
        raise problem.InvalidRequest(
            f"shard must satisfy 0 <= shard < shards, got shard={arriving.shard}, shards={arriving.shards}"
        )
    key = arriving.key
    with arriving.context.database.read() as session:
        runs.get_run(session, arriving.principal, key.run_id)
        attempts.check_attempt(session, key.run_id, key.attempt)
        step = steps.find_step(session, key)
    if step is not None:
        steps.check_expected_shards(step, arriving.shards)


def ingest_shard(arriving: ArrivingShard, upload: uploads.Upload) -> ShardReceipt:
    """Store a received body as a shard; the same bytes again change nothing.

    Raises InvalidRolloutsError and LimitExceededError for an invalid body, ShardConflict if other bytes are stored,
    RunDeleted and AttemptNotFound. After any of these nothing is stored.
    """
    context = arriving.context
    with context.database.read() as session:
        known = _shard_before(session, arriving, upload)
    if known is None:
        name = tokens.shard_file_name(*arriving.key, arriving.shard, upload.digest)
        decoded = _decode_to(arriving, upload, name, arriving.key if arriving.shards == 1 else None)
        shard, is_new = uploads.commit_file(
            context.database, context.store, name,
            lambda session: commit_shard(session, arriving, upload, decoded, name),
        )  # fmt: skip
    else:
        shard, is_new = known, False
        if shard.tokens_purged_at_us is None:
            _restore(arriving, shard, upload)
    return ShardReceipt(
        status="stored" if is_new else "duplicate",
        digest=upload.digest,
        rollouts=shard.rollouts,
        tokens=shard.tokens,
        full_rollouts=shard.rollouts if shard.full_rollouts is None else shard.full_rollouts,
    )


def _shard_before(session: Session, arriving: ArrivingShard, upload: uploads.Upload) -> Shard | None:
    """Return the shard that was stored from these bytes, None if there is none; raise ShardConflict for other bytes."""
    key, shard = arriving.key, shards.find_shard(session, arriving.key, arriving.shard)
    if shard is not None and shard.digest != upload.digest:
        raise ShardConflict(
            f"shard {arriving.shard} of step {key.step} in attempt {key.attempt} is stored with other bytes: "
            f"stored {shard.digest}, got {upload.digest}; register a new attempt if the run was resumed"
        )
    return shard


def _restore(arriving: ArrivingShard, shard: Shard, upload: uploads.Upload) -> None:
    context = arriving.context
    if context.decoders.run(shard_decoding.is_intact, context.store.file(shard.file)):
        return
    decoded = _decode_to(arriving, upload, shard.file, None)

    def note(session: Session) -> None:
        found = shards.find_shard(session, arriving.key, arriving.shard)
        if found is not None:
            found.file_bytes = decoded.file_bytes

    context.database.write(note)
    _logger.warning("%s was gone or damaged, and is restored from the same bytes sent again", shard.file)


def _decode_to(
    arriving: ArrivingShard, upload: uploads.Upload, name: str, whole_step: events.StepKey | None
) -> shard_decoding.DecodedShard:
    """Decode and measure the upload, and publish its tokens in the store under `name`."""
    context = arriving.context
    decode = shard_decoding.decode_statistics if arriving.as_statistics else shard_decoding.decode_shard
    temporary = context.store.temporary_file()
    try:
        limits = worker.decode_limits(context.settings)
        decoded = context.decoders.run(decode, upload.path, temporary, limits, whole_step)
        context.store.publish(upload.path if decoded.keeps_body else temporary, name)
    finally:
        temporary.unlink(missing_ok=True)
    return decoded


def commit_shard(
    session: Session,
    arriving: ArrivingShard,
    upload: uploads.Upload,
    decoded: shard_decoding.DecodedShard,
    file: str,
) -> tuple[Shard, bool]:
    """Insert the catalogue row with the shard's statistics, and close the step if this is its only shard.

    Returns the row, and False if it was there.
    """
    key, measured = arriving.key, decoded.measured
    run = runs.lock_run(session, arriving.principal, key.run_id)
    attempts.check_attempt(session, key.run_id, key.attempt)
    stored = _shard_before(session, arriving, upload)
    if stored is not None:
        return stored, False
    removal.check_not_taken(session, [file])
    step = steps.count_shard(session, key, arriving.shards, measured)
    changes.note_setup(session, step, measured.setup)
    if decoded.step is not None:
        shards.mark_closed(step)
    if attempts.is_active(session, key):
        run.last_step = max(key.step, run.last_step or 0)
    run.rollouts += measured.rollouts
    run.tokens += measured.tokens
    run.last_shard_at_us = step.last_shard_at_us
    # The step first: the rows of the shard have a foreign key to it.
    session.flush()
    shard = Shard(
        **key._asdict(),
        shard=arriving.shard,
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
        received_at_us=step.last_shard_at_us,
    )
    shards.add_shard(session, shard, measured, is_whole_step=decoded.step is not None)
    if decoded.step is not None:
        shards.store_fold(session, key, decoded.step)
        arriving.context.events.publish(session, events.StepClosed(*key))
    elif (
        step.received_shards >= step.expected_shards
        or step.closed_at_us is not None
        or diagnoses.awaits_shards(session, key.run_id)
    ):
        due.mark(session, key.run_id)
    return shard, True
