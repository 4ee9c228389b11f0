"""Queries on scalars."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import ColumnElement, select
from sqlalchemy.orm import Session

from service.platform.database.dialect import upsert
from service.platform.database.tables import Scalar

_KEY = ("run_id", "attempt", "step", "source", "name")
FIRST_SOURCE = "trainer"


def put(session: Session, rows: list[dict[str, Any]]) -> None:
    """Insert or overwrite values."""
    upsert(session, Scalar, rows, _KEY)


def values_of_step(session: Session, run_id: str, attempt: int, step: int) -> dict[str, float]:
    """The step's finite values by name; where several sources report a name, the trainer's, else the first source's."""
    query = select(Scalar).where(Scalar.run_id == run_id, Scalar.attempt == attempt, Scalar.step == step)
    rows = sorted(session.scalars(query), key=lambda row: (row.source != FIRST_SOURCE, row.source))
    values: dict[str, float] = {}
    for row in rows:
        if row.value is not None:
            values.setdefault(row.name, row.value)
    return values


def select_range(
    session: Session,
    run_id: str,
    chosen: ColumnElement[bool],
    sources: Sequence[str],
    names: Sequence[str],
    steps: tuple[int, int],
) -> Sequence[Scalar]:
    """The scalars of the chosen attempts with `steps[0]` ≤ step ≤ `steps[1]`; no sources or names means all of them."""
    query = select(Scalar).where(Scalar.run_id == run_id, chosen, Scalar.step.between(*steps))
    if sources:
        query = query.where(Scalar.source.in_(sources))
    if names:
        query = query.where(Scalar.name.in_(names))
    return session.scalars(query.order_by(Scalar.name, Scalar.source, Scalar.step, Scalar.attempt)).all()
