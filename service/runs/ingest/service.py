"""The way of an uploaded shard: decode and measure in another process, store its tokens, then commit.

The catalogue row is the commit point. Before it, a crash leaves at most a file that no row names; after it, everything
is there. Each step of the way may be repeated.
"""

from __future__ import annotations

from sqlalchemy.orm import Session

from foreshock.clock import now_us
from service.platform.context import ServiceContext
from service.platform.decoding.limits import decode_limits
from service.platform.problem import InvalidRequest, ProblemError
from service.platform.security import Principal
from service.platform.store.tokens import shard_file_name
from service.platform.uploads import Upload
from service.runs.attempts.service import require_attempt
from service.runs.ingest.schemas import ShardAddress, ShardReceipt
from service.runs.rollouts.remeasuring import bring_up_to_date
from service.runs.rollouts.service import add_shard, find_shard
from service.runs.rollouts.shards import DecodedShard, decode_shard
from service.runs.runs.service import get_run, lock_run, raise_newest_step
from service.runs.steps import service as steps


class ShardConflict(ProblemError):
    """Other bytes are already stored under this attempt, step and shard."""

    status = 409


def check_address(context: ServiceContext, principal: Principal, address: ShardAddress) -> None:
    """Refuse, before its body is read, an upload to a run or attempt that is not there or to an impossible shard."""
    if address.shards > context.settings.max_shards:
        raise InvalidRequest(f"query.shards: a step has at most {context.settings.max_shards:,} shards")
    if address.shard >= address.shards:
        raise InvalidRequest(f"shard {address.shard} is not one of {address.shards}: shards count from 0")
    with context.database.read() as session:
        get_run(session, principal, address.run_id)
        require_attempt(session, address.run_id, address.attempt)
        steps.check_expected_shards(session, address.step_key, address.shards)


def ingest_shard(context: ServiceContext, principal: Principal, address: ShardAddress, upload: Upload) -> ShardReceipt:
    """Store a received body as a shard, once.

    Raises InvalidRolloutsError and LimitExceededError for a bad body, ShardConflict where other bytes are stored,
    RunDeleted, AttemptNotFound; in all of these nothing is stored.
    """
    with context.database.read() as session:
        stored = _stored_before(session, address, upload.digest)
    if stored is not None:
        return stored
    name = shard_file_name(address.run_id, address.attempt, address.step, address.shard, upload.digest)
    temporary = context.store.temporary_file()
    try:
        decoded = context.decoders.run(decode_shard, upload.path, temporary, decode_limits(context.settings))
        context.store.publish(temporary, name)
    finally:
        temporary.unlink(missing_ok=True)
    try:
        bring_up_to_date(context, address.step_key)
        receipt = context.database.write(
            lambda session: commit_shard(session, context, principal, address, upload, decoded, name)
        )
    except ProblemError:
        # Refused for certain. After any other error the commit may have happened: the file stays, an orphan at worst.
        context.store.remove(name)
        raise
    if receipt.status == "duplicate":
        context.store.remove(name)
    return receipt


def commit_shard(
    session: Session,
    context: ServiceContext,
    principal: Principal,
    address: ShardAddress,
    upload: Upload,
    decoded: DecodedShard,
    file: str,
) -> ShardReceipt:
    """Insert the catalogue row with the shard's statistics, and close the step where this was its last shard."""
    lock_run(session, principal, address.run_id)
    require_attempt(session, address.run_id, address.attempt)
    stored = _stored_before(session, address, upload.digest)
    if stored is not None:
        return stored
    step = steps.open_step(session, address.step_key, address.shards)
    add_shard(
        session,
        address.step_key,
        {
            **address.step_key._asdict(),
            "shard": address.shard,
            "digest": upload.digest,
            "body_bytes": upload.size,
            "file": file,
            "file_bytes": decoded.file_bytes,
            "rollouts": decoded.rollouts,
            "tokens": decoded.tokens,
            "rollout_set_digest": decoded.rollout_set_digest,
            "received_at_us": now_us(),
        },
        decoded,
    )
    raise_newest_step(session, address.run_id, address.step)
    closed = steps.count_shard(session, context.events, step, decoded.rollouts, decoded.tokens)
    return ShardReceipt(
        status="stored",
        digest=upload.digest,
        rollouts=decoded.rollouts,
        tokens=decoded.tokens,
        step_closed=closed,
    )


def _stored_before(session: Session, address: ShardAddress, digest: str) -> ShardReceipt | None:
    shard = find_shard(session, address.step_key, address.shard)
    if shard is None:
        return None
    if shard.digest != digest:
        raise ShardConflict(
            f"shard {address.shard} of step {address.step} in attempt {address.attempt} holds other bytes "
            f"({shard.digest}): a resumed run needs a new attempt"
        )
    return ShardReceipt(
        status="duplicate",
        digest=shard.digest,
        rollouts=shard.rollouts,
        tokens=shard.tokens,
        step_closed=steps.is_closed(session, address.step_key),
    )
