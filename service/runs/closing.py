"""Close steps: fold their shards outside the writer and outside the run's lock, then store the fold in one transaction.

A step of one shard is folded by the decoder and closed by the transaction that commits the shard. Any other step is
folded here after its last shard is committed, from a snapshot of its shards' statistics. The transaction that stores
the fold locks the run and checks that the step still has these shards; if not, the fold is repeated. A late shard
re-folds a closed step in the same way. If the process dies before the fold is stored, `steps.folded_shards` stays below
`steps.received_shards`, and the sweeper closes the step.
"""

import logging
import threading
from dataclasses import dataclass
from functools import partial
from typing import Literal

from sqlalchemy.orm import Session

from foreshock.clock import now_us
from foreshock_service.platform.context import ServiceContext
from foreshock_service.platform.database.tables import Step
from foreshock_service.runs import events, judging, lint, runs, steps
from foreshock_service.runs.measurements import has_measurement, store_measurements
from foreshock_service.runs.shard_decoding import FoldedStep, fold_step
from foreshock_service.runs.shards import ShardVersions, bring_up_to_date, shard_versions, statistics_of_step

_TRIES = 5
"""Folds of a step, while shards keep arriving, before it is left to the sweeper."""

_STEPS_PER_SWEEP = 100
_logger = logging.getLogger(__name__)

# A process folds a step once at a time: a concurrent fold would repeat the work. Unrelated steps may share a lock.
_LOCKS = tuple(threading.Lock() for _ in range(64))


@dataclass(frozen=True, slots=True)
class _Fold:
    """The fold of a step, and the shards that it was computed from."""

    shards: ShardVersions
    step: FoldedStep


def store_fold(session: Session, key: events.StepKey, folded: FoldedStep, *, again: bool = False) -> None:
    """Store the measurements of a step and the lint's verdict on it; `again`: it has been closed before.

    The caller holds the run's lock.
    """
    # A fold of a part of the shards (the others have another statistics version) never replaces a fold of all.
    kept = [
        each
        for each in folded.measurements
        if not each.from_sample or not has_measurement(session, key, each.comparison)
    ]
    store_measurements(session, key, kept)
    if folded.verdict is not None:
        lint.store_verdict(session, key, folded.verdict, again=again)


def mark_closed(step: Step) -> None:
    """Mark the step as closed, with all received shards folded."""
    step.closed_at_us = step.closed_at_us or now_us()
    step.folded_shards = step.received_shards


def is_waiting(step: Step, grace_us: int | None = None) -> bool:
    """Return True if the step has shards to fold and is complete, closed or overdue.

    It is overdue if its last shard arrived more than `grace_us` ago (None: never), or so far in the future: the clock
    has been set back since.
    """
    complete = step.received_shards >= step.expected_shards
    overdue = grace_us is not None and abs(now_us() - step.last_shard_at_us) > grace_us
    due = complete or step.closed_at_us is not None or overdue
    return step.folded_shards < step.received_shards and due


def try_to_close(context: ServiceContext, key: events.StepKey, grace_us: int | None = None) -> bool:
    """Fold and close the step if `is_waiting`; return True if it is closed now.

    An error is logged and the step is left to the sweeper; its shards stay stored.
    """
    try:
        with _LOCKS[hash(key) % len(_LOCKS)]:
            return _close(context, key, grace_us)
    except Exception:
        _logger.exception(
            "step %s of attempt %s of run %s could not be closed; the sweeper retries",
            *(key.step, key.attempt, key.run_id),
        )
        return False


def close_waiting_steps(context: ServiceContext) -> int:
    """Close the steps that got no shard for the grace time, and those that a crash left complete but open.

    Return the number of closed steps.
    """
    grace_us = int(context.settings.step_grace_seconds * 1e6)
    with context.database.read() as session:
        keys = steps.waiting_steps(session, now_us(), grace_us, _STEPS_PER_SWEEP)
    return sum(try_to_close(context, key, grace_us) for key in keys)


def _close(context: ServiceContext, key: events.StepKey, grace_us: int | None) -> bool:
    for _ in range(_TRIES):
        with context.database.read() as session:
            step = steps.find_step(session, key)
        if step is None or not is_waiting(step, grace_us):
            return step is not None and step.closed_at_us is not None
        bring_up_to_date(context, key)
        with context.database.read() as session:
            fold = _fold(session, key)
        outcome = context.database.write(partial(_store, context, key, fold))
        if outcome != "changed":
            return outcome == "closed"
    _logger.warning(
        "step %s of attempt %s of run %s is not closed: shards kept arriving while it was folded; the sweeper retries",
        *(key.step, key.attempt, key.run_id),
    )
    return False


def _fold(session: Session, key: events.StepKey) -> _Fold:
    parts = statistics_of_step(session, key)
    shards = frozenset((part.shard, part.statistics_version) for part in parts)
    measurements = fold_step(parts)
    for each in measurements:
        if each.from_sample:
            _logger.warning(
                "%s of step %s of attempt %s of run %s includes only some shards, because another release measured the "
                "others: run `foreshock remeasure`",
                *(each.comparison, key.step, key.attempt, key.run_id),
            )
    return _Fold(
        shards, FoldedStep(measurements, judging.judge_step(key.step, key.attempt, lint.evidence_of_step(session, key)))
    )


def _store(
    context: ServiceContext, key: events.StepKey, fold: _Fold, session: Session
) -> Literal["closed", "changed", "deleted"]:
    """Store the fold and close the step; `changed` if the step has other shards now, `deleted` if the run is gone."""
    run = runs.lock_run_for_background(session, key.run_id)
    step = steps.find_step(session, key)
    if run is None or step is None:
        return "deleted"
    if shard_versions(session, key) != fold.shards:
        return "changed"
    if step.folded_shards < step.received_shards:
        again = step.closed_at_us is not None
        mark_closed(step)
        store_fold(session, key, fold.step, again=again)
        session.flush()
        context.events.publish(session, events.StepClosed(*key))
    return "closed"
