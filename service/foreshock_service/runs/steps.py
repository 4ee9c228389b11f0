"""Steps: opening, counting and listing them, and the data that an answer about a step is based on."""

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import TypeVar

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from foreshock.api.records import from_attributes
from foreshock.api.runs import Coverage, IncompleteStep, OfStep, StatisticsStep, StepRecord
from foreshock.clock import now_us
from foreshock.diagnosis.wording import ranks_in_words
from foreshock_service.platform import pagination, parameters, problem
from foreshock_service.platform.database.engine import of_step
from foreshock_service.platform.database.tables import Run, Shard, Step
from foreshock_service.runs import attempts, due, events, runs, shard_decoding

router = parameters.api_router(prefix="/v1/runs/{run}/steps", tags=["steps"])
Answer = TypeVar("Answer", bound=OfStep)

MOST_LISTED = 1000
"""Steps that are listed as incomplete, or as sent in statistics."""
_LACKS_SHARDS = (Step.closed_at_us.is_not(None), Step.received_shards < Step.expected_shards)


class ShardCountConflict(problem.ProblemError, status=409, problem_type="shard-count-conflict"):
    """Conflict: two uploads give different numbers of shards for the step."""


@router.get("")
def list_steps(
    asked: runs.RunToRead,
    attempt: parameters.ActiveOrAttempt = None,
    cursor: pagination.Cursor = None,
    limit: pagination.Limit = 200,
) -> pagination.Page[StepRecord]:
    """List the steps of a run, in order."""
    with asked.reading() as session:
        query = select(Step).where(Step.run_id == asked.run, attempts.rows_of_steps(session, asked.run, attempt, Step))
        return pagination.page_of_query(
            session, query, (Step.step,), cursor, limit, lambda rows: [_record(step) for (step,) in rows], rising=True
        )


def steps_after(session: Session, run_id: str, attempt: int | None, after: int, limit: int) -> list[StepRecord]:
    """Return up to `limit` steps beyond `after` in order: the active ones, or those of one attempt."""
    chosen = attempts.rows_of_steps(session, run_id, attempt, Step, after + 1)
    query = select(Step).where(Step.run_id == run_id, chosen).order_by(Step.step).limit(limit)
    return [_record(step) for step in session.scalars(query)]


def _record(step: Step) -> StepRecord:
    full = _full_rollouts(step)
    return from_attributes(
        StepRecord,
        step,
        shards=step.received_shards,
        closed=step.closed_at_us is not None,
        full_rollouts=full,
        coverage=coverage_in_words(step.rollouts, full),
    )


def find_step(session: Session, key: events.StepKey) -> Step | None:
    return session.get(Step, tuple(key))


def is_closed(session: Session, key: events.StepKey) -> bool:
    return session.scalar(select(Step.closed_at_us).filter_by(**key._asdict())) is not None


def check_expected_shards(step: Step, shards: int) -> None:
    """Raise ShardCountConflict if the step was opened with another number of shards than `shards`."""
    if step.expected_shards != shards:
        raise ShardCountConflict(
            f"step {step.step} of attempt {step.attempt} was opened with shards={step.expected_shards}, not {shards}: "
            "every shard of a step must give the same number"
        )


def count_shard(session: Session, key: events.StepKey, shards: int, shard: shard_decoding.MeasuredShard) -> Step:
    """Count a shard that is added in this transaction in its step, which the first one opens. The run is locked."""
    now, step = now_us(), find_step(session, key)
    if step is None:
        counts = dict.fromkeys(("received_shards", "folded_shards", "rollouts", "tokens"), 0)
        step = Step(**key._asdict(), **counts, expected_shards=shards, first_shard_at_us=now)
        session.add(step)
    check_expected_shards(step, shards)
    step.received_shards += 1
    # The shard's tokens are stored, even if the step was purged before.
    step.tokens_purged_at_us = None
    if shard.full_rollouts is not None or step.full_rollouts is not None:
        if step.full_rollouts is None or step.full_tokens is None:
            step.full_rollouts, step.full_tokens = step.rollouts, step.tokens
        step.full_rollouts += shard.rollouts if shard.full_rollouts is None else shard.full_rollouts
        step.full_tokens += shard.tokens if shard.full_tokens is None else shard.full_tokens
    step.rollouts += shard.rollouts
    step.tokens += shard.tokens
    step.last_shard_at_us = now
    return step


def mark_step(session: Session, key: events.StepKey) -> None:
    """Mark that the run is judged from this step on, which has closed or changed. A superseded step changes nothing."""
    due.mark(session, key.run_id, key.step if attempts.is_active(session, key) else None)


def waiting_steps(session: Session, grace_us: int, run_id: str | None = None) -> list[events.StepKey]:
    """Return steps of a run (None: of any run) that have shards beyond their fold, oldest first.

    Open steps that miss shards are returned only if their last shard arrived more than `grace_us` ago, or so far in the
    future: the clock has been set back since.
    """
    now, arrived = now_us(), Step.last_shard_at_us
    may_fold = (Step.received_shards >= Step.expected_shards) | Step.closed_at_us.is_not(None)
    # The partial index ix_steps_unfolded has the steps of the first condition. Of a run, an expression, so that SQLite
    # reads the few rows of the index and not all steps of the run.
    of_run = () if run_id is None else (Step.run_id + "" == run_id,)
    unfolded = (Step.folded_shards < Step.received_shards, Run.deleted_at_us.is_(None), *of_run)
    query = select(Step.run_id, Step.attempt, Step.step).join(Run, Run.id == Step.run_id).where(*unfolded)
    query = query.where(may_fold | (arrived < now - grace_us) | (arrived > now + grace_us))
    return [events.StepKey(*row) for row in session.execute(query.order_by(arrived))]


def arrival_times(session: Session, run_id: str) -> list[tuple[int, int]]:
    """Return each active step with the time of its last shard, UTC microseconds, in order of steps."""
    active = attempts.active_rows(session, run_id, Step)
    query = select(Step.step, Step.last_shard_at_us).where(Step.run_id == run_id, active)
    return [(step, at) for step, at in session.execute(query.order_by(Step.step))]


# The ranks of a step.


def missing_shards_of(session: Session, step: Step | events.StepKey, expected_shards: int) -> tuple[int, ...]:
    """Return the numbers of the step's shards that are not stored, ascending. A rank sends the shard of its number."""
    stored = set(session.scalars(select(Shard.shard).where(of_step(Shard, step))))
    return tuple(shard for shard in range(expected_shards) if shard not in stored)


def silent_ranks(session: Session, closed: Sequence[Step]) -> tuple[int, ...]:
    """Return the ranks without a stored shard of any of these steps of one attempt, ascending."""
    of_attempt = (Shard.run_id == closed[0].run_id, Shard.attempt == closed[0].attempt)
    of_steps = Shard.step.in_([step.step for step in closed])
    heard = set(session.scalars(select(Shard.shard).where(*of_attempt, of_steps).distinct()))
    return tuple(rank for rank in range(min(step.expected_shards for step in closed)) if rank not in heard)


def count_closed(session: Session, run_id: str, attempt: int) -> int:
    active = attempts.active_rows(session, run_id, Step)
    of_attempt = (Step.run_id == run_id, Step.attempt == attempt, Step.closed_at_us.is_not(None), active)
    return session.scalar(select(func.count()).where(*of_attempt)) or 0


def shards_in_words(shards: int, expected_shards: int, missing: Sequence[int] = ()) -> str:
    """Return how many shards of a step are stored, and the numbers of the missing ones if they are given."""
    text = f"{shards} of {expected_shards} shards"
    if not missing:
        return text
    return f"{text} (missing: {ranks_in_words(missing)})"


# The data that an answer about a step is based on.


def missing_shards(session: Session, key: events.StepKey, limit: int) -> Sequence[Step]:
    """Return the newest `limit` active steps of the attempt, from this one on, that closed without some shards."""
    active = attempts.active_rows(session, key.run_id, Step, key.step)
    of_attempt = (Step.run_id == key.run_id, Step.attempt == key.attempt, active)
    return session.scalars(
        select(Step).where(*of_attempt, *_LACKS_SHARDS).order_by(Step.step.desc()).limit(limit)
    ).all()


def incomplete_steps(session: Session, run_id: str) -> list[IncompleteStep]:
    """Return the active steps that closed without some of their shards, newest first, at most MOST_LISTED."""
    active = attempts.active_rows(session, run_id, Step)
    query = select(Step).where(Step.run_id == run_id, *_LACKS_SHARDS, active)
    found = session.scalars(query.order_by(Step.step.desc()).limit(MOST_LISTED))
    return [each for step in found if (each := incomplete_step(step)) is not None]


def incomplete_counts(session: Session, run_ids: Collection[str]) -> dict[str, int]:
    """Return how many active closed steps of each run lack shards, in one query; runs without one are absent."""
    superseded = attempts.is_superseded(Step.run_id, Step.attempt, Step.step)
    query = select(Step.run_id, func.count()).where(Step.run_id.in_(run_ids), *_LACKS_SHARDS, ~superseded)
    return {row[0]: row[1] for row in session.execute(query.group_by(Step.run_id))}


def incomplete_step(step: Step | None) -> IncompleteStep | None:
    """Return what a step lacks that closed without some of its shards; None for other steps."""
    if step is None or step.closed_at_us is None or step.received_shards >= step.expected_shards:
        return None
    return from_attributes(IncompleteStep, step, shards=step.received_shards)


def with_shards(session: Session, key: events.StepKey, answer: Answer) -> Answer:
    return replace(answer, incomplete=incomplete_step(find_step(session, key)))


def statistics_steps(session: Session, run_id: str) -> list[StatisticsStep]:
    """Return the newest active steps with shards sent as statistics whose tokens are stored, newest first."""
    query = select(Step).where(
        Step.run_id == run_id,
        Step.full_rollouts.is_not(None),
        Step.tokens_purged_at_us.is_(None),
        attempts.active_rows(session, run_id, Step),
    )
    return [
        from_attributes(StatisticsStep, step, text=coverage_in_words(step.rollouts, _full_rollouts(step)))
        for step in session.scalars(query.order_by(Step.step.desc()).limit(MOST_LISTED))
    ]


def coverage_of_step(session: Session, key: events.StepKey, used: int | None = None) -> Coverage:
    """Return the coverage of an answer that uses `used` rollouts of a step; None: those that are stored in full."""
    step = find_step(session, key)
    rollouts, full = (0, 0) if step is None else (step.rollouts, _full_rollouts(step))
    used = full if used is None else used
    whole = used >= rollouts
    return Coverage(
        rests_on="all tokens" if whole else "some rollouts",
        rollouts=rollouts,
        used_rollouts=used,
        full_rollouts=full,
        text=coverage_in_words(rollouts, full) if whole else f"{used:,} of {rollouts:,} rollouts",
    )


def coverage_in_words(rollouts: int, full_rollouts: int) -> str:
    """Return in words which data the measures of a step are based on."""
    if full_rollouts >= rollouts:
        return "all tokens"
    return f"all tokens, in statistics; {full_rollouts:,} of {rollouts:,} rollouts in full"


def _full_rollouts(step: Step) -> int:
    return step.rollouts if step.full_rollouts is None else step.full_rollouts
