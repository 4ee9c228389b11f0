"""Scalars: stored per source; a step that has closed already is observed again with them."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy.orm import Session

from foreshock.clock import now_us
from foreshock.json_values import finite_or_none
from service.platform.database.tables import Scalar
from service.platform.events import EventBus
from service.platform.security import Principal
from service.runs.attempts.active_attempts import survives
from service.runs.attempts.repository import of_run
from service.runs.attempts.service import require_attempt
from service.runs.events import ScalarsChanged
from service.runs.runs.service import get_run, lock_run
from service.runs.scalars import repository
from service.runs.scalars.schemas import ScalarColumns, ScalarsPut, ScalarsRead
from service.runs.steps.service import is_closed


def put_scalars(
    session: Session,
    events: EventBus,
    principal: Principal,
    run_id: str,
    attempt: int,
    step: int,
    body: ScalarsPut,
) -> None:
    """Store what a source reports for a step; before or after the step closes comes to the same."""
    lock_run(session, principal, run_id)
    require_attempt(session, run_id, attempt)
    now = now_us()
    rows = [
        {
            "run_id": run_id,
            "attempt": attempt,
            "step": step,
            "source": body.source,
            "name": name,
            "value": finite_or_none(value),
            "received_at_us": now,
        }
        for name, value in sorted(body.values.items())
    ]
    repository.put(session, rows)
    if is_closed(session, run_id, attempt, step):
        events.publish(session, ScalarsChanged(run_id, attempt, step))


def read_scalars(
    session: Session,
    principal: Principal,
    run_id: str,
    sources: Sequence[str],
    names: Sequence[str],
    attempt: int | None,
    steps: tuple[int, int],
) -> ScalarsRead:
    """The scalars of the steps that survive, or of one attempt."""
    get_run(session, principal, run_id)
    if attempt is not None:
        require_attempt(session, run_id, attempt)
        chosen = Scalar.attempt == attempt
    else:
        chosen = survives(of_run(session, run_id), Scalar.attempt, Scalar.step)
    columns = ScalarColumns()
    for row in repository.select_range(session, run_id, chosen, sources, names, steps):
        columns.step.append(row.step)
        columns.attempt.append(row.attempt)
        columns.source.append(row.source)
        columns.name.append(row.name)
        columns.value.append(row.value)
    return ScalarsRead(columns=columns)
