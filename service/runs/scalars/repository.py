"""Queries on scalars."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, Select, select
from sqlalchemy.orm import Session

from foreshock_service.platform.columnar import Kind
from foreshock_service.platform.database.engine import table_of, upsert
from foreshock_service.platform.database.tables import Scalar
from foreshock_service.runs.attempts.active_attempts import ActiveRange
from foreshock_service.runs.step_key import StepKey

_KEY = ("run_id", "attempt", "step", "source", "name")
COLUMNS: Mapping[str, Kind] = {
    "step": "integer", "attempt": "integer", "source": "label", "name": "label", "value": "float"
}  # fmt: skip
"""The columns of an answer, and what they hold."""

_scalars = table_of(Scalar).c


class ReportedValue(NamedTuple):
    """Value that a source reported for a step; None if it was not a finite number."""

    step: int
    source: str
    name: str
    value: float | None


def put(session: Session, rows: list[dict[str, Any]]) -> None:
    """Insert or overwrite values."""
    upsert(session, Scalar, rows, _KEY)


def of_step(session: Session, key: StepKey) -> list[ReportedValue]:
    """Return every scalar of a step."""
    query = select(Scalar.step, Scalar.source, Scalar.name, Scalar.value).where(
        Scalar.run_id == key.run_id, Scalar.attempt == key.attempt, Scalar.step == key.step
    )
    return [ReportedValue(*row) for row in session.execute(query)]


def named_in_range(session: Session, run_id: str, steps: ActiveRange, names: Sequence[str]) -> list[ReportedValue]:
    """Return the scalars of these names in a range of steps."""
    query = select(_scalars.step, _scalars.source, _scalars.name, _scalars.value)
    return [ReportedValue(*row) for row in session.execute(query.where(*_named_within(run_id, steps, names)))]


def steps_in_range(session: Session, run_id: str, steps: ActiveRange, names: Sequence[str], limit: int) -> list[int]:
    """Return the first `limit` steps of a range that have a scalar of these names, in order."""
    query = select(_scalars.step).where(*_named_within(run_id, steps, names)).group_by(_scalars.step)
    return list(session.scalars(query.order_by(_scalars.step).limit(limit)))


def newest_step(session: Session, run_id: str, attempt: int, names: Sequence[str]) -> int | None:
    """Return the newest step of an attempt that has a scalar of these names; None if none has."""
    # By falling step: the primary key is read from its end, and the first row usually is one.
    query = select(_scalars.step).where(
        _scalars.run_id == run_id, _scalars.attempt == attempt, _scalars.name.in_(names)
    )
    return session.scalar(query.order_by(_scalars.step.desc()).limit(1))


def _named_within(run_id: str, steps: ActiveRange, names: Sequence[str]) -> tuple[ColumnElement[bool], ...]:
    return (_scalars.run_id == run_id, *steps.contains(_scalars.attempt, _scalars.step), _scalars.name.in_(names))


def range_query(
    run_id: str, chosen: ColumnElement[bool], sources: Sequence[str], names: Sequence[str], steps: tuple[int, int]
) -> Select[Any]:
    """Return the query for `COLUMNS` of the chosen attempts over `steps[0]` ≤ step ≤ `steps[1]`.

    No sources or names: all.
    """
    query = select(*(_scalars[name] for name in COLUMNS)).where(
        _scalars.run_id == run_id, chosen, _scalars.step.between(*steps)
    )
    if sources:
        query = query.where(_scalars.source.in_(sources))
    if names:
        query = query.where(_scalars.name.in_(names))
    return query
