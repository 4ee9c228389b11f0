"""Ingest an uploaded shard: decode and measure it in another process, store its tokens, commit it, close its step.

The catalogue row is the commit point. A crash before it leaves at most a file that no row names. After it the shard
counts, and the sweeper closes the step if the request did not. Every part can be repeated safely."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Literal

from sqlalchemy.orm import Session

from foreshock.api.runs import ShardReceipt
from foreshock.clock import now_us
from foreshock_service.platform.context import ServiceContext
from foreshock_service.platform.database.tables import Run, Shard, Step
from foreshock_service.platform.decoding.worker import decode_limits
from foreshock_service.platform.problem import InvalidRequest, ProblemError
from foreshock_service.platform.security import Principal
from foreshock_service.platform.store.tokens import shard_file_name
from foreshock_service.platform.uploads import Upload
from foreshock_service.runs.attempts.service import check_attempt
from foreshock_service.runs.changes.service import note_setup
from foreshock_service.runs.deletions import search_step_again
from foreshock_service.runs.events import ShardAwaitsOthers, StepClosed
from foreshock_service.runs.rollouts.service import add_shard, find_shard, set_file_bytes
from foreshock_service.runs.rollouts.shards import DecodedShard, decode_shard, is_intact
from foreshock_service.runs.rollouts.statistics_shards import decode_statistics
from foreshock_service.runs.runs.service import check_run, lock_run, note_upload
from foreshock_service.runs.step_key import StepKey
from foreshock_service.runs.steps.closing import is_waiting, mark_closed, store_fold, try_to_close
from foreshock_service.runs.steps.service import (
    check_expected_shards,
    compared_ranks,
    count_shard,
    expected_shards_of,
    find_step,
    open_step,
    store_step,
)


@dataclass(frozen=True, slots=True)
class ShardAddress:
    """Shard `shard` of `shards`, of a step in an attempt of a run, sent as tokens or as statistics."""

    run_id: str
    attempt: int
    step: int
    shard: int
    shards: int
    as_statistics: bool = False

    @property
    def step_key(self) -> StepKey:
        """Return the key of the step."""
        return StepKey(self.run_id, self.attempt, self.step)


class ShardConflict(ProblemError):
    """Other bytes are already stored under this attempt, step and shard."""

    status = 409
    problem_type = "shard-conflict"


_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Committed:
    """A stored shard; `waits_for_fold` is True if its step has to be folded now."""

    receipt: ShardReceipt
    waits_for_fold: bool


def check_address(context: ServiceContext, principal: Principal, address: ShardAddress) -> bool:
    """Check the address of an upload before its body is read; return whether the step has shards already.

    Raises RunNotFound, RunDeleted, AttemptNotFound, InvalidRequest if there is no such shard, and ShardCountConflict if
    the step was opened with another number of shards.
    """
    if address.shards > context.settings.max_shards:
        raise InvalidRequest(f"query.shards must be at most {context.settings.max_shards:,}, got {address.shards:,}")
    if address.shard >= address.shards:
        raise InvalidRequest(
            f"shard must satisfy 0 <= shard < shards, got shard={address.shard}, shards={address.shards}"
        )
    with context.database.read() as session:
        check_run(session, principal, address.run_id)
        check_attempt(session, address.run_id, address.attempt)
        expected = expected_shards_of(session, address.step_key)
    if expected is not None:
        check_expected_shards(address.step_key, expected, address.shards)
    return expected is not None


def ingest_shard(
    context: ServiceContext, principal: Principal, address: ShardAddress, upload: Upload, *, step_has_shards: bool
) -> ShardReceipt:
    """Store a received body as a shard; the same bytes again change nothing.

    If `step_has_shards`, as `check_address` answered, a stored shard is looked for before the body is decoded.

    Raises InvalidRolloutsError and LimitExceededError for an invalid body, ShardConflict if other bytes are stored,
    RunDeleted and AttemptNotFound. After any of these nothing is stored.
    """
    committed = _find_stored(context, address, upload) if step_has_shards else None
    if committed is None:
        name = shard_file_name(address.run_id, address.attempt, address.step, address.shard, upload.digest)
        with context.store.in_flight(name):
            committed = _store_shard(context, principal, address, upload, name)
    if not committed.waits_for_fold:
        return committed.receipt
    closed = try_to_close(context, address.step_key)
    return replace(committed.receipt, step_closed=closed)


def _find_stored(context: ServiceContext, address: ShardAddress, upload: Upload) -> _Committed | None:
    """Return the stored shard if it has these bytes, None if there is none; raises ShardConflict for other bytes.

    Its token file is written again if it is gone or damaged.
    """
    with context.database.read() as session:
        step = find_step(session, address.step_key)
        stored = None if step is None else _stored_before(session, address, upload.digest, step)
        shard = find_shard(session, address.step_key, address.shard) if stored is not None else None
    if shard is not None and shard.tokens_removed is None:
        _restore(context, address, shard, upload)
    return stored


def _restore(context: ServiceContext, address: ShardAddress, shard: Shard, upload: Upload) -> None:
    if context.decoders.run(is_intact, context.store.file(shard.file)):
        return
    decoded = _decode_to(context, address, upload, shard.file, None)

    def note(session: Session) -> None:
        set_file_bytes(session, address.step_key, address.shard, decoded.file_bytes)
        # The bytes may hold rollouts that were deleted since.
        search_step_again(session, address.step_key)

    context.database.write(note)
    _logger.warning("%s was gone or damaged, and is restored from the same bytes sent again", shard.file)


def _decode_to(
    context: ServiceContext, address: ShardAddress, upload: Upload, name: str, whole_step: StepKey | None
) -> DecodedShard:
    """Decode and measure the upload, and publish its tokens in the store under `name`."""
    temporary = context.store.temporary_name()
    written = True
    try:
        decoded = context.decoders.run(
            decode_statistics if address.as_statistics else decode_shard,
            upload.path,
            temporary,
            decode_limits(context.settings),
            whole_step,
        )
        written = not decoded.keeps_body
        context.store.publish(temporary if written else upload.path, name)
    finally:
        if written:
            temporary.unlink(missing_ok=True)
    return decoded


def _store_shard(
    context: ServiceContext, principal: Principal, address: ShardAddress, upload: Upload, name: str
) -> _Committed:
    whole_step = address.step_key if address.shards == 1 else None
    decoded = _decode_to(context, address, upload, name, whole_step)
    may_be_committed = False

    def commit(session: Session) -> _Committed:
        nonlocal may_be_committed
        may_be_committed = False
        run = lock_run(session, principal, address.run_id)
        committed = commit_shard(session, context, run, address, upload, decoded, name)
        may_be_committed = True
        return committed

    try:
        committed = context.database.write(commit)
    except Exception:
        # An error of the commit itself does not tell whether it happened: the file stays, at worst as an orphan.
        if not may_be_committed:
            context.store.remove(name)
        raise
    if committed.receipt.status == "duplicate":
        context.store.remove(name)
    else:
        context.ingest_rate.note(committed.receipt.tokens)
    return committed


def commit_shard(
    session: Session,
    context: ServiceContext,
    run: Run,
    address: ShardAddress,
    upload: Upload,
    decoded: DecodedShard,
    file: str,
) -> _Committed:
    """Insert the catalogue row with the shard's statistics, and close the step if this is its only shard.

    The run is locked.
    """
    check_attempt(session, address.run_id, address.attempt)
    key, measured = address.step_key, decoded.measured
    # Most steps are new: that is asked without making an object of the row.
    step = find_step(session, key) if expected_shards_of(session, key) is not None else None
    if step is not None:
        stored = _stored_before(session, address, upload.digest, step)
        if stored is not None:
            return stored
        check_expected_shards(key, step.expected_shards, address.shards)
    else:
        step = open_step(key, address.shards)
    full = measured.full
    counted = None if full is None else (full.rollouts, full.tokens)
    count_shard(step, measured.rollouts, measured.tokens, counted)
    note_setup(session, step, measured.setup)
    if decoded.step is not None:
        mark_closed(step)
    # First: the rows of the shard have a foreign key to the row of the step.
    store_step(session, step)
    note_upload(session, run, key.step, measured.rollouts, measured.tokens)
    row = {
        **key._asdict(),
        "shard": address.shard,
        "digest": upload.digest,
        "body_bytes": upload.size,
        "file": file,
        "file_bytes": decoded.file_bytes,
        "rollouts": measured.rollouts,
        "tokens": measured.tokens,
        "full_rollouts": None if full is None else full.rollouts,
        "full_tokens": None if full is None else full.tokens,
        "sampled_rollouts": None if full is None else full.sampled,
        "rollout_set_digest": measured.rollout_set_digest,
        "received_at_us": now_us(),
    }
    add_shard(session, key, row, measured, is_whole_step=decoded.step is not None)
    if run.deletions:
        search_step_again(session, key)
    if address.shards > 1:
        for compared in compared_ranks(session, key):
            context.events.publish(session, compared)
    if decoded.step is not None:
        store_fold(session, key, decoded.step)
        context.events.publish(session, StepClosed(*key))
    elif step.received_shards < step.expected_shards and step.closed_at_us is None:
        context.events.publish(session, ShardAwaitsOthers(*key))
    return _committed("stored", upload.digest, measured.rollouts, measured.tokens, row["full_rollouts"], step)


def _stored_before(session: Session, address: ShardAddress, digest: str, step: Step) -> _Committed | None:
    shard = find_shard(session, address.step_key, address.shard)
    if shard is None:
        return None
    if shard.digest != digest:
        raise ShardConflict(
            f"shard {address.shard} of step {address.step} in attempt {address.attempt} is stored with other bytes: "
            f"stored {shard.digest}, got {digest}; register a new attempt if the run was resumed"
        )
    return _committed("duplicate", digest, shard.rollouts, shard.tokens, shard.full_rollouts, step)


def _committed(
    status: Literal["stored", "duplicate"],
    digest: str,
    rollouts: int,
    tokens: int,
    full_rollouts: int | None,
    step: Step,
) -> _Committed:
    receipt = ShardReceipt(
        status=status,
        digest=digest,
        rollouts=rollouts,
        tokens=tokens,
        full_rollouts=rollouts if full_rollouts is None else full_rollouts,
        step_closed=step.closed_at_us is not None,
    )
    return _Committed(receipt, is_waiting(step))
