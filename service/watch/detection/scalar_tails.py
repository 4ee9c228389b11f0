"""The newest step of a run without rollouts: what is derived when scalars arrive, and when the step closes."""

from functools import partial

from sqlalchemy import or_, select
from sqlalchemy.orm import Session

from foreshock.clock import now_us
from foreshock_service.platform.context import EventBus, ServiceContext
from foreshock_service.platform.database.tables import Run, ScalarTail
from foreshock_service.runs.attempts import active_attempt_of, attempts_of_run
from foreshock_service.runs.events import ScalarsLogged
from foreshock_service.runs.runs import lock_run_for_background
from foreshock_service.watch.detection import derivation, history

_RUNS_PER_SWEEP = 100


def observe_scalars(events: EventBus, session: Session, logged: ScalarsLogged) -> None:
    """Derive detection over the steps that these scalars close or change. The run is locked.

    Scalars of superseded steps change nothing, and neither do names that nothing reads.
    """
    if logged.names.isdisjoint(history.watched_run(session, logged.run_id).names):
        return
    attempts = attempts_of_run(session, logged.run_id)
    if active_attempt_of(attempts, logged.step) != logged.attempt:
        return
    tail = session.get(ScalarTail, logged.run_id)
    here = (logged.attempt, logged.step)
    if tail is None:
        session.add(
            ScalarTail(
                run_id=logged.run_id, attempt=logged.attempt, step=logged.step, received_at_us=now_us(), closed=False
            )
        )
        session.flush()
        return
    before, was_closed = (tail.attempt, tail.step), tail.closed
    if here >= before:
        tail.attempt, tail.step = here
        tail.received_at_us = now_us()
        tail.closed = was_closed and here == before
        session.flush()
    is_newest_attempt = logged.attempt == max(each.attempt for each in attempts)
    if here[0] > before[0] or (here == before and is_newest_attempt and not was_closed):
        # The first step of an attempt, or the step that is open: nothing has closed.
        return
    derivation.derive_from(events, session, logged.run_id, attempts, min(here, before)[1])


def close_scalar_tails(context: ServiceContext) -> int:
    """Close the newest steps that got no scalars for the grace time, or whose run has ended; return how many."""
    before = now_us() - int(context.settings.step_grace_seconds * 1e6)
    with context.database.read() as session:
        runs = _runs_with_due_tail(session, before, _RUNS_PER_SWEEP)
    return sum(context.database.write(partial(_close, context.events, run_id)) for run_id in runs)


def _runs_with_due_tail(session: Session, before_us: int, limit: int) -> list[str]:
    """Return up to `limit` runs whose newest scalars are older than that, or which have ended, and are still open."""
    query = (
        select(ScalarTail.run_id)
        .join(Run, Run.id == ScalarTail.run_id)
        .where(
            ScalarTail.closed.is_(False),
            Run.deleted_at_us.is_(None),
            or_(ScalarTail.received_at_us < before_us, Run.state.in_(("finished", "failed"))),
        )
    )
    return list(session.scalars(query.order_by(ScalarTail.run_id).limit(limit)))


def _close(events: EventBus, run_id: str, session: Session) -> bool:
    run, tail = lock_run_for_background(session, run_id), session.get(ScalarTail, run_id)
    if run is None or tail is None or tail.closed:
        return False
    tail.closed = True
    session.flush()
    if run.last_step is None:
        derivation.derive_from(events, session, run_id, attempts_of_run(session, run_id), tail.step)
    return True
