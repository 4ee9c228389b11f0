"""Queries on weights searches."""

from __future__ import annotations

from typing import Any

from sqlalchemy import select, update
from sqlalchemy.orm import Session

from service.platform.database.dialect import upsert
from service.platform.database.tables.probes import StoredWeightsSearch
from service.runs.step_key import StepKey


def put(session: Session, row: dict[str, Any]) -> None:
    """Store the search of a try; the same try may send it again."""
    upsert(session, StoredWeightsSearch, [row], ("job_id", "token"))


def find(session: Session, job_id: str, token: int) -> StoredWeightsSearch | None:
    """Return the search of a try."""
    return session.get(StoredWeightsSearch, (job_id, token))


def publish(session: Session, job_id: str, token: int, now_us: int) -> None:
    """Have the search of a try count."""
    same = (StoredWeightsSearch.job_id == job_id, StoredWeightsSearch.token == token)
    session.execute(update(StoredWeightsSearch).where(*same).values(published_at_us=now_us))


def newest(session: Session, key: StepKey) -> StoredWeightsSearch | None:
    """Return the newest published search of a step."""
    query = select(StoredWeightsSearch).filter_by(**key._asdict())
    query = query.where(StoredWeightsSearch.published_at_us.is_not(None))
    order = (StoredWeightsSearch.published_at_us.desc(), StoredWeightsSearch.job_id)
    return session.scalars(query.order_by(*order).limit(1)).first()
