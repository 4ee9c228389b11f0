"""The closed steps of a run without rollouts.

A step that has a scalar that is watched closes when a later step of its attempt has one, when a newer attempt begins,
or after a grace time (`scalar_tails.py`). So which steps are closed, and their values, do not depend on the order in
which scalars arrived; late scalars of a closed step change it.
"""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy.orm import Session

from foreshock_service.runs.attempts.active_attempts import AttemptStart
from foreshock_service.runs.scalars.service import newest_step_with_scalars, steps_with_scalars
from foreshock_service.watch.detection import repository


def closed_scalar_steps(
    session: Session, run_id: str, attempts: Sequence[AttemptStart], after: int, names: Sequence[str], limit: int
) -> list[tuple[int, int]]:
    """Return (step, attempt) of the first `limit` active steps beyond `after` that scalars have closed, in order."""
    steps = steps_with_scalars(session, run_id, attempts, names, after, limit)
    if not steps or steps[-1][1] != (newest := max(each.attempt for each in attempts)):
        return steps
    last = steps[-1][0]
    if last != newest_step_with_scalars(session, run_id, newest, names):
        return steps
    tail = repository.scalar_tail(session, run_id)
    closed = tail is not None and tail.closed and tail.attempt == newest and tail.step >= last
    return steps if closed else steps[:-1]
