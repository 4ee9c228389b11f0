"""The newest step of a run that logs only scalars: no later step closes it, so it closes after a grace time."""

from functools import partial

from sqlalchemy import or_, select
from sqlalchemy.orm import Session

from foreshock.clock import now_us
from foreshock_service.platform.context import ServiceContext
from foreshock_service.platform.database.engine import upsert
from foreshock_service.platform.database.tables import Run, ScalarTail
from foreshock_service.runs import due, steps
from foreshock_service.runs.attempts import attempts_of_run, is_active
from foreshock_service.runs.events import ScalarsLogged
from foreshock_service.runs.failing_runs import for_each_run
from foreshock_service.runs.runs import ENDED, lock_run_for_background
from foreshock_service.watch.detection import history

_RUNS_PER_SWEEP = 100


def observe_scalars(session: Session, logged: ScalarsLogged) -> None:
    """Mark the run from the first step that these scalars close or change. The run is locked.

    Scalars of superseded steps and scalars that no detector reads close and change none.
    """
    watched = history.watched_run(session, logged.run_id)
    if logged.names.isdisjoint(watched.names):
        due.mark(session, logged.run_id)
        return
    if not watched.scalars_only:
        steps.mark_step(session, logged.key)
        return
    if not is_active(session, logged):
        return
    attempts = [each.attempt for each in attempts_of_run(session, logged.run_id)]
    tail = session.get(ScalarTail, logged.run_id)
    here = (attempts.index(logged.attempt), logged.step)
    before = None if tail is None else (attempts.index(tail.attempt), tail.step)
    was_closed = tail is not None and tail.closed
    if before is None or here >= before:
        key = {"run_id": logged.run_id, "attempt": logged.attempt, "step": logged.step}
        row = {**key, "received_at_us": now_us(), "closed": was_closed and here == before}
        upsert(session, ScalarTail, [row], ("run_id",))
    is_still_open = here == before and logged.attempt == attempts[-1] and not was_closed
    # Not if it is the first step of an attempt, or the step that is still open: no step has closed.
    if before is not None and here[0] <= before[0] and not is_still_open:
        due.mark(session, logged.run_id, min(here, before)[1])


def close_scalar_tails(context: ServiceContext) -> int:
    """Close the newest steps that got no scalars for the grace time, or whose run has ended; return how many."""
    before = now_us() - int(context.settings.step_grace_seconds * 1e6)
    waiting = (
        select(ScalarTail.run_id)
        .join(Run, Run.id == ScalarTail.run_id)
        .where(
            ScalarTail.closed.is_(False),
            Run.deleted_at_us.is_(None),
            or_(ScalarTail.received_at_us < before, Run.state.in_(ENDED)),
        )
    )
    with context.database.read() as session:
        runs = session.scalars(waiting.order_by(ScalarTail.run_id).limit(_RUNS_PER_SWEEP)).all()
    database, events = context.database, context.events
    return for_each_run(database, events, runs, lambda run_id: database.write(partial(_close, run_id)))


def _close(run_id: str, session: Session) -> bool:
    run, tail = lock_run_for_background(session, run_id), session.get(ScalarTail, run_id)
    if run is None or tail is None or tail.closed:
        return False
    tail.closed = True
    session.flush()
    if run.last_step is None:
        due.mark(session, run_id, tail.step)
    return True
