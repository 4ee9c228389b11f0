"""Steps: opened by their first shard, closed by their last one or by the sweeper."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy.orm import Session

from foreshock.api.runs import StepRecord
from foreshock.clock import now_us
from foreshock_service.platform.database.tables import Step
from foreshock_service.platform.parameters import CursorKey, Page, decode_cursor, page_of
from foreshock_service.platform.problem import ProblemError
from foreshock_service.platform.security import Principal
from foreshock_service.runs.attempts.service import attempts_begun_together, attempts_of_run, require_attempt
from foreshock_service.runs.coverage import coverage_in_words
from foreshock_service.runs.events import RanksCompared
from foreshock_service.runs.runs.service import get_run
from foreshock_service.runs.step_key import StepKey
from foreshock_service.runs.steps import repository

_MOST_NAMED = 8
"""Missing shards that a sentence names."""


class ShardCountConflict(ProblemError):
    """Conflict: two uploads give different numbers of shards for the step."""

    status = 409
    problem_type = "shard-count-conflict"


@dataclass(frozen=True, slots=True)
class RanksSplit:
    """Step of which two attempts that began together hold different shards: they are ranks of one launch."""

    step: int
    shards: tuple[int, ...]
    other_attempt: int
    other_shards: tuple[int, ...]
    expected_shards: int


def check_expected_shards(key: StepKey, expected: int, shards: int) -> None:
    """Raise ShardCountConflict if the step was opened with another number of shards than `shards`."""
    if expected != shards:
        raise ShardCountConflict(
            f"step {key.step} of attempt {key.attempt} was opened with shards={expected}, not {shards}: "
            "every shard of a step must give the same number"
        )


def open_step(key: StepKey, shards: int) -> Step:
    """Return a new step that has no shard yet, for `store_step`."""
    now = now_us()
    return Step(
        **key._asdict(),
        expected_shards=shards,
        received_shards=0,
        folded_shards=0,
        rollouts=0,
        tokens=0,
        full_rollouts=None,
        full_tokens=None,
        setups=None,
        first_shard_at_us=now,
        last_shard_at_us=now,
        closed_at_us=None,
    )


def store_step(session: Session, step: Step) -> None:
    """Write the step: inserted if it is new, else with what has changed. The run is locked."""
    if step in session:
        session.flush()
    else:
        repository.add(session, step)


def expected_shards_of(session: Session, key: StepKey) -> int | None:
    """Return the number of shards that the step was opened with; None if no shard of it was uploaded."""
    return repository.expected_shards_of(session, key)


def count_shard(step: Step, rollouts: int, tokens: int, full: tuple[int, int] | None) -> None:
    """Count a shard that is added in this transaction, in its step. The run is locked.

    `full` has the rollouts and tokens that are stored in full; None: all of them.
    """
    step.received_shards += 1
    # Its tokens are stored, whatever was purged of the step before.
    step.tokens_purged_at_us = None
    if full is not None or step.full_rollouts is not None or step.full_tokens is not None:
        before = (step.rollouts, step.tokens) if step.full_rollouts is None else (step.full_rollouts, step.full_tokens)
        added = (rollouts, tokens) if full is None else full
        step.full_rollouts, step.full_tokens = before[0] + added[0], (before[1] or 0) + added[1]
    step.rollouts += rollouts
    step.tokens += tokens
    step.last_shard_at_us = now_us()


def find_step(session: Session, key: StepKey) -> Step | None:
    """Return the step; None if no shard of it was uploaded."""
    return repository.find(session, key)


def is_closed(session: Session, key: StepKey) -> bool:
    """Return whether the step exists and is closed."""
    return repository.is_closed(session, key)


def shards_in_words(shards: int, expected_shards: int, missing: Sequence[int] = ()) -> str:
    """Return how many shards of a step are stored, and the numbers of the missing ones if they are given."""
    text = f"{shards} of {expected_shards} shards"
    if not missing:
        return text
    named = ", ".join(map(str, missing[:_MOST_NAMED]))
    others = f" and {len(missing) - _MOST_NAMED} more" if len(missing) > _MOST_NAMED else ""
    return f"{text} (missing: {'shard' if len(missing) == 1 else 'shards'} {named}{others})"


def missing_shards_of(session: Session, key: StepKey, expected_shards: int) -> tuple[int, ...]:
    """Return the numbers of the step's shards that are not stored, ascending. A rank sends the shard of its number."""
    stored = repository.shards_of(session, key)
    return tuple(shard for shard in range(expected_shards) if shard not in stored)


def compared_ranks(session: Session, key: StepKey) -> list[RanksCompared]:
    """Return an event for the step's attempt, and for each later one, that began together with an older one.

    Empty for most runs: no other attempt began within a minute of the step's.
    """
    together = [each.attempt for each in attempts_begun_together(session, key.run_id, key.attempt)]
    later = [attempt for attempt in together if attempt > key.attempt]
    return [
        RanksCompared(key.run_id, attempt, key.step)
        for attempt in ([key.attempt, *later] if len(later) < len(together) else later)
    ]


def first_split(session: Session, key: StepKey, *, last: int | None = None) -> RanksSplit | None:
    """Return the first split at the step or after it, up to the step `last` (None: no bound); None if there is none.

    A step is split between its attempt and an older one that began together with it if both hold shards of the step and
    none in common.
    """
    together = attempts_begun_together(session, key.run_id, key.attempt)
    older = [each.attempt for each in together if each.attempt < key.attempt]
    found = repository.first_split(session, key, older, last) if older else None
    if found is None:
        return None
    step, other, expected_shards = found
    here, there = (
        tuple(sorted(repository.shards_of(session, StepKey(key.run_id, attempt, step))))
        for attempt in (key.attempt, other)
    )
    return RanksSplit(step, here, other, there, expected_shards)


def list_steps(
    session: Session, principal: Principal, run_id: str, attempt: int | None, cursor: str | None, limit: int
) -> Page[StepRecord]:
    """Return one page of a run's steps in order: the active ones, or those of one attempt."""
    get_run(session, principal, run_id)
    if attempt is not None:
        require_attempt(session, run_id, attempt)
    after = int(decode_cursor(cursor, (int,))[0]) if cursor is not None else -1
    attempts = attempts_of_run(session, run_id)
    rows = repository.page_of_run(session, run_id, attempts, attempt, after, limit + 1)
    return page_of([_read(row) for row in rows], limit, _key_of)


def arrival_times(session: Session, run_id: str) -> list[tuple[int, int]]:
    """Return each active step with the time of its last shard, UTC microseconds, in order of steps."""
    return repository.arrival_times(session, run_id, attempts_of_run(session, run_id))


def _read(step: Step) -> StepRecord:
    full = step.rollouts if step.full_rollouts is None else step.full_rollouts
    return StepRecord(
        step=step.step,
        attempt=step.attempt,
        shards=step.received_shards,
        expected_shards=step.expected_shards,
        closed=step.closed_at_us is not None,
        rollouts=step.rollouts,
        tokens=step.tokens,
        full_rollouts=full,
        coverage=coverage_in_words(step.rollouts, full),
    )


def _key_of(step: StepRecord) -> CursorKey:
    return (step.step,)


def missing_shards(session: Session, key: StepKey, limit: int) -> Sequence[Step]:
    """Return the newest `limit` steps of the attempt, from this one on, that closed without some of their shards.

    Only active ones, the newest first.
    """
    return repository.missing_shards(session, key, attempts_of_run(session, key.run_id), limit)
