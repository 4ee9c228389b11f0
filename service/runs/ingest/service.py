"""Ingest an uploaded shard: decode and measure it in another process, store its tokens, commit it, close its step.

The catalogue row is the commit point. Before it, a crash leaves at most a file that no row names; after it, the shard
counts, and the sweeper closes the step if the request did not. Each part may be repeated.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sqlalchemy.orm import Session

from foreshock.clock import now_us
from service.platform.context import ServiceContext
from service.platform.database.tables import Step
from service.platform.decoding.limits import decode_limits
from service.platform.problem import InvalidRequest, ProblemError
from service.platform.security import Principal
from service.platform.store.tokens import shard_file_name
from service.platform.uploads import Upload
from service.runs.attempts.service import require_attempt
from service.runs.events import StepClosed
from service.runs.ingest.schemas import ShardAddress, ShardReceipt
from service.runs.rollouts.service import add_shard, find_shard
from service.runs.rollouts.shards import DecodedShard, decode_shard
from service.runs.runs.service import get_run, lock_run
from service.runs.steps.closing import is_waiting, mark_closed, store_fold, try_to_close
from service.runs.steps.service import check_expected_shards, count_shard, find_step, open_step


class ShardConflict(ProblemError):
    """Other bytes are already stored under this attempt, step and shard."""

    status = 409


@dataclass(frozen=True, slots=True)
class _Committed:
    """A stored shard, and whether its step now waits to be folded."""

    receipt: ShardReceipt
    waits_for_fold: bool


def check_address(context: ServiceContext, principal: Principal, address: ShardAddress) -> None:
    """Refuse, before its body is read, an upload to a run or attempt that is not there or to an impossible shard."""
    if address.shards > context.settings.max_shards:
        raise InvalidRequest(f"query.shards: a step has at most {context.settings.max_shards:,} shards")
    if address.shard >= address.shards:
        raise InvalidRequest(f"shard {address.shard} is not one of {address.shards}: shards count from 0")
    with context.database.read() as session:
        get_run(session, principal, address.run_id)
        require_attempt(session, address.run_id, address.attempt)
        step = find_step(session, address.step_key)
        if step is not None:
            check_expected_shards(step, address.shards)


def ingest_shard(context: ServiceContext, principal: Principal, address: ShardAddress, upload: Upload) -> ShardReceipt:
    """Store a received body as a shard, once.

    Raises InvalidRolloutsError and LimitExceededError for a bad body, ShardConflict where other bytes are stored,
    RunDeleted, AttemptNotFound; in all of these nothing is stored.
    """
    with context.database.read() as session:
        step = find_step(session, address.step_key)
        committed = None if step is None else _stored_before(session, address, upload.digest, step)
    if committed is None:
        committed = _store_shard(context, principal, address, upload)
    if not committed.waits_for_fold:
        return committed.receipt
    closed = try_to_close(context, address.step_key)
    return committed.receipt.model_copy(update={"step_closed": closed})


def _store_shard(context: ServiceContext, principal: Principal, address: ShardAddress, upload: Upload) -> _Committed:
    name = shard_file_name(address.run_id, address.attempt, address.step, address.shard, upload.digest)
    whole_step = address.step_key if address.shards == 1 else None
    temporary = context.store.temporary_file()
    try:
        decoded = context.decoders.run(
            decode_shard, upload.path, temporary, decode_limits(context.settings), whole_step
        )
        context.store.publish(temporary, name)
    finally:
        temporary.unlink(missing_ok=True)
    try:
        committed = context.database.write(
            lambda session: commit_shard(session, context, principal, address, upload, decoded, name)
        )
    except ProblemError:
        # Refused for certain. After any other error the commit may have happened: the file stays, an orphan at worst.
        context.store.remove(name)
        raise
    if committed.receipt.status == "duplicate":
        context.store.remove(name)
    return committed


def commit_shard(
    session: Session,
    context: ServiceContext,
    principal: Principal,
    address: ShardAddress,
    upload: Upload,
    decoded: DecodedShard,
    file: str,
) -> _Committed:
    """Insert the catalogue row with the shard's statistics, and close the step if this shard is all of it."""
    run = lock_run(session, principal, address.run_id)
    require_attempt(session, address.run_id, address.attempt)
    key, measured = address.step_key, decoded.measured
    step = find_step(session, key)
    if step is not None:
        stored = _stored_before(session, address, upload.digest, step)
        if stored is not None:
            return stored
        check_expected_shards(step, address.shards)
    else:
        step = open_step(session, key, address.shards)
    count_shard(run, step, measured.rollouts, measured.tokens)
    if decoded.step is not None:
        mark_closed(step)
    # The rows of the shard refer to that of the step.
    session.flush()
    row = {
        **key._asdict(),
        "shard": address.shard,
        "digest": upload.digest,
        "body_bytes": upload.size,
        "file": file,
        "file_bytes": decoded.file_bytes,
        "rollouts": measured.rollouts,
        "tokens": measured.tokens,
        "rollout_set_digest": measured.rollout_set_digest,
        "received_at_us": now_us(),
    }
    add_shard(session, key, row, measured)
    if decoded.step is not None:
        store_fold(session, key, decoded.step)
        context.events.publish(session, StepClosed(*key))
    return _committed("stored", upload.digest, measured.rollouts, measured.tokens, step)


def _stored_before(session: Session, address: ShardAddress, digest: str, step: Step) -> _Committed | None:
    shard = find_shard(session, address.step_key, address.shard)
    if shard is None:
        return None
    if shard.digest != digest:
        raise ShardConflict(
            f"shard {address.shard} of step {address.step} in attempt {address.attempt} holds other bytes "
            f"({shard.digest}): a resumed run needs a new attempt"
        )
    return _committed("duplicate", digest, shard.rollouts, shard.tokens, step)


def _committed(
    status: Literal["stored", "duplicate"], digest: str, rollouts: int, tokens: int, step: Step
) -> _Committed:
    closed = step.closed_at_us is not None
    receipt = ShardReceipt(status=status, digest=digest, rollouts=rollouts, tokens=tokens, step_closed=closed)
    return _Committed(receipt, is_waiting(step))
