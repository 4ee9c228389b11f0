"""Steps: opened by their first shard, closed by their last one or by the sweeper."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from itertools import groupby

from sqlalchemy.orm import Session

from foreshock.clock import now_us
from foreshock.measures.statistics.blob import STATISTICS_VERSION
from service.platform.context import ServiceContext
from service.platform.database.dialect import insert_if_absent
from service.platform.database.tables import ShardStatistics, Step
from service.platform.events import EventBus
from service.platform.pagination import CursorKey, Page, decode_cursor, page_of
from service.platform.problem import ProblemError
from service.platform.security import Principal
from service.runs.attempts.service import attempts_of_run, require_attempt
from service.runs.events import StepClosed
from service.runs.measurements.folding import fold_shards
from service.runs.measurements.service import has_measurement, store_measurement
from service.runs.rollouts.remeasuring import bring_up_to_date
from service.runs.rollouts.service import statistics_of_step
from service.runs.runs.service import get_run, lock_run_for_background
from service.runs.step_key import StepKey
from service.runs.steps import repository
from service.runs.steps.schemas import StepRead

_CLOSED_AT_ONCE = 100
_logger = logging.getLogger(__name__)


class ShardCountConflict(ProblemError):
    """Two uploads disagree about how many shards the step has."""

    status = 409


def check_expected_shards(session: Session, key: StepKey, shards: int) -> None:
    """Raise ShardCountConflict where the step was opened with another number of shards."""
    found = repository.find(session, key)
    if found is not None and found.expected_shards != shards:
        raise ShardCountConflict(
            f"step {key.step} of attempt {key.attempt} was opened with shards={found.expected_shards}, not {shards}: "
            "every shard of a step must give the same number"
        )


def open_step(session: Session, key: StepKey, shards: int) -> Step:
    """The step, made now if this is its first shard; raises ShardCountConflict. The run is locked."""
    now = now_us()
    row = {
        **key._asdict(),
        "expected_shards": shards,
        "received_shards": 0,
        "folded_shards": 0,
        "rollouts": 0,
        "tokens": 0,
        "first_shard_at_us": now,
        "last_shard_at_us": now,
        "closed_at_us": None,
    }
    insert_if_absent(session, Step, row)
    check_expected_shards(session, key, shards)
    found = repository.find(session, key)
    assert found is not None
    return found


def count_shard(session: Session, events: EventBus, step: Step, rollouts: int, tokens: int) -> bool:
    """Count a shard that was just added; close the step with its last one, fold again after that. Whether closed."""
    step.received_shards += 1
    step.rollouts += rollouts
    step.tokens += tokens
    step.last_shard_at_us = now_us()
    if step.received_shards >= step.expected_shards or step.closed_at_us is not None:
        close_step(session, events, step)
    return step.closed_at_us is not None


def close_step(session: Session, events: EventBus, step: Step) -> None:
    """Fold what is there into measurements and publish StepClosed, all in this transaction. The run is locked."""
    shards = statistics_of_step(session, _key(step))
    for comparison, group in groupby(shards, key=lambda each: each.comparison):
        _store_fold(session, step, comparison, list(group))
    step.closed_at_us = step.closed_at_us or now_us()
    step.folded_shards = step.received_shards
    session.flush()
    events.publish(session, StepClosed(step.run_id, step.attempt, step.step))


def find_step(session: Session, key: StepKey) -> Step | None:
    """Return the step; None if no shard of it was uploaded."""
    return repository.find(session, key)


def is_closed(session: Session, key: StepKey) -> bool:
    """Return whether the step exists and is closed."""
    found = repository.find(session, key)
    return found is not None and found.closed_at_us is not None


def close_overdue_steps(context: ServiceContext) -> int:
    """Close the steps whose shards stayed away for the grace time; how many."""
    before = now_us() - int(context.settings.step_grace_seconds * 1e6)
    with context.database.read() as session:
        overdue = repository.overdue(session, before, _CLOSED_AT_ONCE)
    keys = [_key(each) for each in overdue]
    return sum(_try_to_close(context, before, key) for key in keys)


def list_steps(
    session: Session, principal: Principal, run_id: str, attempt: int | None, cursor: str | None, limit: int
) -> Page[StepRead]:
    """One page of a run's steps in order: the active ones, or those of one attempt."""
    get_run(session, principal, run_id)
    if attempt is not None:
        require_attempt(session, run_id, attempt)
    after = int(decode_cursor(cursor, (int,))[0]) if cursor is not None else -1
    attempts = attempts_of_run(session, run_id)
    rows = repository.page_of_run(session, run_id, attempts, attempt, after, limit + 1)
    return page_of([_read(row) for row in rows], limit, _key_of)


def _store_fold(session: Session, step: Step, comparison: str, shards: Sequence[ShardStatistics]) -> None:
    """Store the fold of a comparison's shards.

    Shards of another version were measured again before, unless their tokens are gone. What is left then counts as a
    sample, so that the step closes all the same; it never replaces what was folded of all.
    """
    current = [shard for shard in shards if shard.statistics_version == STATISTICS_VERSION]
    is_sample = len(current) < len(shards)
    if is_sample:
        _logger.warning(
            "step %s of attempt %s of run %s closes with %d of %d shards in %s: another release measured the others; "
            "run `foreshock remeasure`",
            *(step.step, step.attempt, step.run_id, len(current), len(shards), comparison),
        )
        if not current or has_measurement(session, _key(step), comparison):
            return
    folded = fold_shards(comparison, current)
    store_measurement(session, _key(step), folded, from_sample=is_sample)


def _try_to_close(context: ServiceContext, before_us: int, key: StepKey) -> bool:
    try:
        bring_up_to_date(context, key)
        return context.database.write(partial(_close_if_overdue, context, before_us, key))
    except Exception:
        # The others are not to wait for this one.
        _logger.exception("step %s of attempt %s of run %s cannot be closed", key.step, key.attempt, key.run_id)
        return False


def _close_if_overdue(context: ServiceContext, before_us: int, key: StepKey, session: Session) -> bool:
    run = lock_run_for_background(session, key.run_id)
    found = repository.find(session, key)
    if run is None or found is None:
        return False
    if found.closed_at_us is not None or found.last_shard_at_us >= before_us:
        return False
    close_step(session, context.events, found)
    return True


def _key(step: Step) -> StepKey:
    return StepKey(step.run_id, step.attempt, step.step)


def _read(step: Step) -> StepRead:
    return StepRead(
        step=step.step,
        attempt=step.attempt,
        shards=step.received_shards,
        expected_shards=step.expected_shards,
        closed=step.closed_at_us is not None,
        rollouts=step.rollouts,
        tokens=step.tokens,
    )


def _key_of(step: StepRead) -> CursorKey:
    return (step.step,)
