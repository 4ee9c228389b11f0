"""Queries on steps."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import exists, select
from sqlalchemy.orm import Session, aliased

from foreshock_service.platform.database.tables import Run, Shard, Step
from foreshock_service.runs.attempts.active_attempts import AttemptStart, is_active
from foreshock_service.runs.step_key import StepKey


def find(session: Session, key: StepKey) -> Step | None:
    """Return the step; None if no shard of it was uploaded."""
    # The primary key of `steps` is the fields of a StepKey.
    return session.get(Step, tuple(key))


def add(session: Session, step: Step) -> None:
    """Insert a new step, and make the object that of the session."""
    session.add(step)
    session.flush()


def expected_shards_of(session: Session, key: StepKey) -> int | None:
    """Return the number of shards that the step was opened with; None if there is no such step."""
    return session.scalar(select(Step.expected_shards).filter_by(**key._asdict()))


def is_closed(session: Session, key: StepKey) -> bool:
    """Return whether the step exists and is closed."""
    return session.scalar(select(Step.closed_at_us).filter_by(**key._asdict())) is not None


def shards_of(session: Session, key: StepKey) -> frozenset[int]:
    """Return the shards of a step that are stored."""
    table = Shard
    query = select(table.shard).where(table.run_id == key.run_id, table.attempt == key.attempt, table.step == key.step)
    return frozenset(session.scalars(query))


def first_split(session: Session, key: StepKey, others: Sequence[int], last: int | None) -> tuple[int, int, int] | None:
    """Return (step, other attempt, expected shards) of the first step from this one to `last` that is split; else None.

    Split: this attempt and one of the others hold shards of the step, and none in common.
    """
    here, there = aliased(Step), aliased(Step)
    mine, theirs = aliased(Shard), aliased(Shard)
    shared = (
        exists()
        .where(mine.run_id == key.run_id, mine.attempt == key.attempt, mine.step == here.step)
        .where(theirs.run_id == key.run_id, theirs.attempt == there.attempt, theirs.step == here.step)
        .where(mine.shard == theirs.shard)
    )
    query = (
        select(here.step, there.attempt, here.expected_shards)
        .join(there, (there.run_id == here.run_id) & (there.step == here.step))
        .where(here.run_id == key.run_id, here.attempt == key.attempt, here.step >= key.step)
        .where(there.attempt.in_(others), here.expected_shards > 1, there.expected_shards > 1, ~shared)
    )
    if last is not None:
        query = query.where(here.step <= last)
    row = session.execute(query.order_by(here.step, there.attempt).limit(1)).first()
    return None if row is None else (row[0], row[1], row[2])


def missing_shards(session: Session, key: StepKey, attempts: Sequence[AttemptStart], limit: int) -> Sequence[Step]:
    """Return the newest `limit` active steps of the attempt, from this one on, that closed without some shards."""
    query = select(Step).where(Step.run_id == key.run_id, Step.attempt == key.attempt, Step.step >= key.step)
    query = query.where(Step.closed_at_us.is_not(None), Step.received_shards < Step.expected_shards)
    query = query.where(is_active(attempts, Step.attempt, Step.step, key.step))
    return session.scalars(query.order_by(Step.step.desc()).limit(limit)).all()


def waiting(session: Session, now_us: int, grace_us: int, limit: int) -> list[StepKey]:
    """Return up to `limit` steps of runs that are not deleted which have shards beyond their fold, oldest first.

    Open steps that miss shards are returned only if their last shard arrived more than `grace_us` ago, or so far in the
    future: the clock has been set back since.
    """
    due = (
        (Step.received_shards >= Step.expected_shards)
        | Step.closed_at_us.is_not(None)
        | (Step.last_shard_at_us < now_us - grace_us)
        | (Step.last_shard_at_us > now_us + grace_us)
    )
    # The partial index ix_steps_unfolded holds exactly the steps of the first condition.
    unfolded = Step.folded_shards < Step.received_shards
    query = select(Step.run_id, Step.attempt, Step.step).join(Run, Run.id == Step.run_id)
    query = query.where(unfolded, due, Run.deleted_at_us.is_(None))
    return [StepKey(*row) for row in session.execute(query.order_by(Step.last_shard_at_us).limit(limit))]


def page_of_run(
    session: Session, run_id: str, attempts: Sequence[AttemptStart], attempt: int | None, after: int, limit: int
) -> Sequence[Step]:
    """Return up to `limit` steps beyond `after`, in order: those of one attempt, or the active ones."""
    chosen = Step.attempt == attempt if attempt is not None else is_active(attempts, Step.attempt, Step.step)
    query = select(Step).where(Step.run_id == run_id, Step.step > after, chosen)
    return session.scalars(query.order_by(Step.step).limit(limit)).all()


def arrival_times(session: Session, run_id: str, attempts: Sequence[AttemptStart]) -> list[tuple[int, int]]:
    """Return the active steps with the time of their last shard, in order of steps."""
    query = select(Step.step, Step.last_shard_at_us).where(
        Step.run_id == run_id, is_active(attempts, Step.attempt, Step.step)
    )
    return [(step, at) for step, at in session.execute(query.order_by(Step.step))]
