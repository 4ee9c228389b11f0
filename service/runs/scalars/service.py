"""Scalars, stored per source.

Scalars that arrive after their step closed publish ScalarsChanged, those of a run without rollouts ScalarsLogged."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import BaseModel, Field
from sqlalchemy.orm import Session

from foreshock.clock import now_us
from foreshock.json_values import finite_or_none
from foreshock_service.platform.columnar import ColumnTable, check_answer, keep_extremes, read_columns
from foreshock_service.platform.context import EventBus
from foreshock_service.platform.database.tables import Scalar
from foreshock_service.platform.parameters import LARGEST_STEP, Name, check_step_range
from foreshock_service.platform.security import Principal
from foreshock_service.platform.settings import Settings
from foreshock_service.runs.attempts.active_attempts import AttemptStart, active_ranges, is_active
from foreshock_service.runs.attempts.service import attempts_of_run, check_attempt, require_attempt
from foreshock_service.runs.events import ScalarsChanged, ScalarsLogged
from foreshock_service.runs.runs.service import get_run, lock_run
from foreshock_service.runs.scalars import repository
from foreshock_service.runs.scalars.repository import ReportedValue
from foreshock_service.runs.step_key import StepKey
from foreshock_service.runs.steps.service import is_closed


class ScalarsPut(BaseModel):
    """Values of one source for one step. Existing names are overwritten; other names of the source stay."""

    source: Name = "trainer"
    values: dict[Name, float | None] = Field(
        min_length=1, max_length=1000, description="null: the source computed a value that is not finite"
    )


class ScalarColumns(BaseModel):
    """Columns of scalars: lists of equal length."""

    step: list[int] = Field(default_factory=list)
    attempt: list[int] = Field(default_factory=list)
    source: list[str] = Field(default_factory=list)
    name: list[str] = Field(default_factory=list)
    value: list[float | None] = Field(default_factory=list)


class ScalarsRead(BaseModel):
    """Scalars by column, ordered by name, source and step."""

    columns: ScalarColumns


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
    run = lock_run(session, principal, run_id)
    check_attempt(session, run_id, attempt)
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
    key = StepKey(run.id, attempt, step)
    if is_closed(session, key):
        events.publish(session, ScalarsChanged(*key, frozenset(body.values)))
    elif run.last_step is None:
        events.publish(session, ScalarsLogged(*key, frozenset(body.values)))


def scalars_of_step(session: Session, key: StepKey) -> dict[str, float]:
    """Return the finite values of a step by name, each from its preferred source."""
    return _values_by_step(repository.of_step(session, key)).get(key.step, {})


def scalars_of_active_steps(
    session: Session, run_id: str, attempts: Sequence[AttemptStart], names: Sequence[str], steps: tuple[int, int]
) -> dict[int, dict[str, float]]:
    """Return step → name → finite value, from the preferred source, for active steps `steps[0]` ≤ step ≤ `steps[1]`."""
    ranges = active_ranges(attempts, *steps)
    return _values_by_step([row for each in ranges for row in repository.named_in_range(session, run_id, each, names)])


def steps_with_scalars(
    session: Session, run_id: str, attempts: Sequence[AttemptStart], names: Sequence[str], after: int, limit: int
) -> list[tuple[int, int]]:
    """Return (step, attempt) of the first `limit` active steps beyond `after` that have a scalar of these names."""
    found: list[tuple[int, int]] = []
    for each in reversed(active_ranges(attempts, first=after + 1)):
        if len(found) < limit:
            steps = repository.steps_in_range(session, run_id, each, names, limit - len(found))
            found += [(step, each.attempt) for step in steps]
    return found


def newest_step_with_scalars(session: Session, run_id: str, attempt: int, names: Sequence[str]) -> int | None:
    """Return the newest step of the attempt that has a scalar of these names; None if none has."""
    return repository.newest_step(session, run_id, attempt, names)


@dataclass(frozen=True, slots=True)
class ScalarQuery:
    """Request for scalars; no sources or names: all; `attempt` None: the active steps."""

    sources: Sequence[str] = ()
    names: Sequence[str] = ()
    attempt: int | None = None
    from_step: int = 0
    to_step: int = LARGEST_STEP
    max_points: int | None = None


def read_scalars(
    session: Session, settings: Settings, principal: Principal, run_id: str, query: ScalarQuery
) -> ColumnTable:
    """Return step, attempt, source, name and value, ordered by name, source, step and attempt.

    Raises AnswerTooLarge beyond the settings' caps, before more is read.
    """
    get_run(session, principal, run_id)
    check_step_range(query.from_step, query.to_step)
    steps = (query.from_step, query.to_step)
    if query.attempt is not None:
        chosen = Scalar.attempt == require_attempt(session, run_id, query.attempt).attempt
    else:
        chosen = is_active(attempts_of_run(session, run_id), Scalar.attempt, Scalar.step, *steps)
    statement = repository.range_query(run_id, chosen, query.sources, query.names, steps)
    most = settings.max_answer_values if query.max_points is None else settings.max_read_values
    table = read_columns(session, statement, repository.COLUMNS, most).sorted_by("name", "source", "step", "attempt")
    if query.max_points is not None:
        table = keep_extremes(table, ("name", "source"), ("value",), query.max_points)
    check_answer(table, settings.max_answer_values)
    return table


def _values_by_step(rows: Sequence[ReportedValue]) -> dict[int, dict[str, float]]:
    values: defaultdict[int, dict[str, float]] = defaultdict(dict)
    for row in sorted(rows, key=lambda each: (each.source != FIRST_SOURCE, each.source)):
        if row.value is not None:
            values[row.step].setdefault(row.name, row.value)
    return values
