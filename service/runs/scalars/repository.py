"""Queries on scalars."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import ColumnElement, select
from sqlalchemy.orm import Session

from service.platform.database.dialect import upsert
from service.platform.database.tables import Scalar
from service.runs.step_key import StepKey

_KEY = ("run_id", "attempt", "step", "source", "name")


def put(session: Session, rows: list[dict[str, Any]]) -> None:
    """Insert or overwrite values."""
    upsert(session, Scalar, rows, _KEY)


def of_step(session: Session, key: StepKey) -> Sequence[Scalar]:
    """Return every scalar of a step."""
    query = select(Scalar).where(Scalar.run_id == key.run_id, Scalar.attempt == key.attempt, Scalar.step == key.step)
    return session.scalars(query).all()


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
