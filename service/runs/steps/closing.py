"""Close steps: fold their shards outside the writer and outside the run's lock, then store the fold in one transaction.

A step of one shard is folded by the decoder and closed by the transaction that commits the shard. Any other is folded
here after its last shard is committed, from a snapshot of its shards' statistics; the transaction that stores the fold
checks, with the run locked, that the step still has these shards, else the fold is repeated. A late shard changes the
fold of a closed step in the same way. If the process dies in between, `steps.folded_shards` stays below
`steps.received_shards`, which the sweeper looks for.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from functools import partial
from typing import Literal

from sqlalchemy.orm import Session

from foreshock.clock import now_us
from service.platform.context import ServiceContext
from service.platform.database.tables import Step
from service.runs.events import StepClosed
from service.runs.lint.judging import judge_step
from service.runs.lint.service import evidence_of_step, store_verdict
from service.runs.measurements.folding import fold_step
from service.runs.measurements.service import has_measurement, store_measurements
from service.runs.rollouts.remeasuring import bring_up_to_date
from service.runs.rollouts.service import ShardVersions, shard_versions, statistics_of_step
from service.runs.rollouts.shards import FoldedStep
from service.runs.runs.service import lock_run_for_background
from service.runs.step_key import StepKey
from service.runs.steps import repository

_TRIES = 5
"""Folds of a step before it is left to the sweeper, because shards keep arriving."""

_CLOSED_AT_ONCE = 100
_logger = logging.getLogger(__name__)

# One fold of a step at a time in a process: a second one would be of the same shards. Unrelated steps may share a lock.
_LOCKS = tuple(threading.Lock() for _ in range(64))


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A fold, and the shards that it is of."""

    shards: ShardVersions
    step: FoldedStep


def store_fold(session: Session, key: StepKey, folded: FoldedStep) -> None:
    """Store the measurements of a step and the lint's verdict on it. The run is locked."""
    # A fold of some shards only, because the others are of another version, never replaces one of all.
    kept = [
        each
        for each in folded.measurements
        if not each.from_sample or not has_measurement(session, key, each.comparison)
    ]
    store_measurements(session, key, kept)
    if folded.verdict is not None:
        store_verdict(session, key, folded.verdict)


def mark_closed(step: Step) -> None:
    """Set the columns of a step whose shards are all in its fold."""
    step.closed_at_us = step.closed_at_us or now_us()
    step.folded_shards = step.received_shards


def is_waiting(step: Step, overdue_before_us: int = 0) -> bool:
    """Return whether the step has shards that are not in its fold, and is complete, closed or overdue.

    It is overdue if its last shard arrived before `overdue_before_us`.
    """
    complete = step.received_shards >= step.expected_shards
    due = complete or step.closed_at_us is not None or step.last_shard_at_us < overdue_before_us
    return step.folded_shards < step.received_shards and due


def try_to_close(context: ServiceContext, key: StepKey, overdue_before_us: int = 0) -> bool:
    """Fold and close the step if it waits for that; return whether it is closed now.

    An error is logged and leaves the step to the sweeper: its shards are stored.
    """
    try:
        with _LOCKS[hash(key) % len(_LOCKS)]:
            return _close(context, key, overdue_before_us)
    except Exception:
        _logger.exception("step %s of attempt %s of run %s cannot be closed", key.step, key.attempt, key.run_id)
        return False


def close_waiting_steps(context: ServiceContext) -> int:
    """Close the steps whose shards stopped arriving for the grace time, and those that a crash left complete but open.

    Return how many steps were closed.
    """
    before = now_us() - int(context.settings.step_grace_seconds * 1e6)
    with context.database.read() as session:
        keys = repository.waiting(session, before, _CLOSED_AT_ONCE)
    return sum(try_to_close(context, key, before) for key in keys)


def _close(context: ServiceContext, key: StepKey, overdue_before_us: int) -> bool:
    for _ in range(_TRIES):
        with context.database.read() as session:
            step = repository.find(session, key)
        if step is None or not is_waiting(step, overdue_before_us):
            return step is not None and step.closed_at_us is not None
        bring_up_to_date(context, key)
        with context.database.read() as session:
            prepared = _prepare(session, key)
        outcome = context.database.write(partial(_store, context, key, prepared))
        if outcome != "changed":
            return outcome == "closed"
    _logger.warning(
        "shards of step %s of attempt %s of run %s kept arriving while it was folded; it is closed later",
        *(key.step, key.attempt, key.run_id),
    )
    return False


def _prepare(session: Session, key: StepKey) -> _Prepared:
    parts = statistics_of_step(session, key)
    shards = frozenset((part.shard, part.statistics_version) for part in parts)
    measurements = fold_step(parts)
    for each in measurements:
        if each.from_sample:
            _logger.warning(
                "%s of step %s of attempt %s of run %s is of some of its shards: another release measured the others; "
                "run `foreshock remeasure`",
                *(each.comparison, key.step, key.attempt, key.run_id),
            )
    return _Prepared(
        shards, FoldedStep(measurements, judge_step(key.step, key.attempt, evidence_of_step(session, key)))
    )


def _store(
    context: ServiceContext, key: StepKey, prepared: _Prepared, session: Session
) -> Literal["closed", "changed", "deleted"]:
    """Close the step with the fold, unless it has other shards by now (`changed`) or its run is deleted."""
    run = lock_run_for_background(session, key.run_id)
    step = repository.find(session, key)
    if run is None or step is None:
        return "deleted"
    if shard_versions(session, key) != prepared.shards:
        return "changed"
    if step.folded_shards < step.received_shards:
        mark_closed(step)
        store_fold(session, key, prepared.step)
        session.flush()
        context.events.publish(session, StepClosed(*key))
    return "closed"
