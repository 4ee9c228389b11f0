"""Scalars, stored per source. Scalars that arrive after their step closed publish ScalarsChanged."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from sqlalchemy.orm import Session

from foreshock.clock import now_us
from foreshock.json_values import finite_or_none
from service.platform.database.tables import Attempt, Scalar
from service.platform.events import EventBus
from service.platform.security import Principal
from service.runs.attempts.active_attempts import active_ranges, is_active
from service.runs.attempts.service import attempts_of_run, require_attempt
from service.runs.events import ScalarsChanged
from service.runs.runs.service import get_run, lock_run
from service.runs.scalars import repository
from service.runs.scalars.repository import ReportedValue
from service.runs.scalars.schemas import ScalarColumns, ScalarsPut, ScalarsRead
from service.runs.step_key import StepKey
from service.runs.steps.service import is_closed

FIRST_SOURCE = "trainer"
"""The preferred source if several report a name; without it, the first source by name is used."""


def put_scalars(
    session: Session,
    events: EventBus,
    principal: Principal,
    run_id: str,
    attempt: int,
    step: int,
    body: ScalarsPut,
) -> None:
    """Store the scalars of a source for a step, before or after the step closes."""
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
    key = StepKey(run_id, attempt, step)
    if is_closed(session, key):
        events.publish(session, ScalarsChanged(*key))


def scalars_of_step(session: Session, key: StepKey) -> dict[str, float]:
    """Return the finite values of a step by name, each from its preferred source."""
    return _values_by_step(repository.of_step(session, key)).get(key.step, {})


def scalars_of_active_steps(
    session: Session, run_id: str, attempts: Sequence[Attempt], names: Sequence[str], steps: tuple[int, int]
) -> dict[int, dict[str, float]]:
    """Return step → name → finite value, from the preferred source, for active steps `steps[0]` ≤ step ≤ `steps[1]`."""
    ranges = active_ranges(attempts, *steps)
    return _values_by_step([row for each in ranges for row in repository.named_in_range(session, run_id, each, names)])


def read_scalars(
    session: Session,
    principal: Principal,
    run_id: str,
    sources: Sequence[str],
    names: Sequence[str],
    attempt: int | None,
    steps: tuple[int, int],
) -> ScalarsRead:
    """Return the scalars of the active steps, or of one attempt."""
    get_run(session, principal, run_id)
    if attempt is not None:
        require_attempt(session, run_id, attempt)
        chosen = Scalar.attempt == attempt
    else:
        chosen = is_active(attempts_of_run(session, run_id), Scalar.attempt, Scalar.step, *steps)
    columns = ScalarColumns()
    for row in repository.select_range(session, run_id, chosen, sources, names, steps):
        columns.step.append(row.step)
        columns.attempt.append(row.attempt)
        columns.source.append(row.source)
        columns.name.append(row.name)
        columns.value.append(row.value)
    return ScalarsRead(columns=columns)


def _values_by_step(rows: Sequence[ReportedValue]) -> dict[int, dict[str, float]]:
    values: defaultdict[int, dict[str, float]] = defaultdict(dict)
    for row in sorted(rows, key=lambda each: (each.source != FIRST_SOURCE, each.source)):
        if row.value is not None:
            values[row.step].setdefault(row.name, row.value)
    return values
