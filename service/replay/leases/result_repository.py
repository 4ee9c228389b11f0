"""Queries on results that a try of a job sends before it completes: kept by try, published with the job, read by step.

Each kind of result has a table of its own, with the columns of `StoredResult`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, TypeVar

from sqlalchemy import select, update
from sqlalchemy.orm import Session

from foreshock_service.platform.database.dialect import upsert
from foreshock_service.platform.database.tables.probe_results import StoredResult
from foreshock_service.runs.step_key import StepKey

Row = TypeVar("Row", bound=StoredResult)


class ResultRepository(Generic[Row]):
    """The results of one table."""

    def __init__(self, table: type[Row]) -> None:
        self._table = table

    def put(self, session: Session, row: dict[str, Any]) -> None:
        """Store the result of a try; the same try may send it again."""
        upsert(session, self._table, [row], ("job_id", "token"))

    def publish(self, session: Session, job_id: str, token: int, now_us: int) -> bool:
        """Have the result of a try count; return whether it was sent."""
        same = (self._table.job_id == job_id, self._table.token == token)
        query = update(self._table).where(*same).values(published_at_us=now_us).returning(self._table.job_id)
        return session.scalar(query) is not None

    def newest(self, session: Session, key: StepKey, limit: int, **equal: str) -> Sequence[Row]:
        """Return at most `limit` published results of a step, newest first, those with these values of columns."""
        query = select(self._table).filter_by(**key._asdict(), **equal).where(self._table.published_at_us.is_not(None))
        order = (self._table.published_at_us.desc(), self._table.job_id)
        return session.scalars(query.order_by(*order).limit(limit)).all()
