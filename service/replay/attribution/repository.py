"""Queries on attributions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import select, update
from sqlalchemy.orm import Session

from foreshock_service.platform.database.engine import upsert
from foreshock_service.platform.database.tables import Run
from foreshock_service.platform.database.tables.probes import Attribution
from foreshock_service.runs.active_steps import AttemptStart, is_active
from foreshock_service.runs.events import StepKey

_KEY = StepKey._fields


def find(session: Session, key: StepKey) -> Attribution | None:
    """Return the attribution of a step; its document is None until one was computed."""
    return session.get(Attribution, tuple(key))


def exists(session: Session, key: StepKey) -> bool:
    """Return whether the step has an attribution, computed or not."""
    return session.scalar(select(Attribution.step).filter_by(**key._asdict())) is not None


def lock(session: Session, key: StepKey) -> None:
    """Lock the attribution of a step until the transaction ends, so that none is marked as stale meanwhile."""
    session.execute(select(Attribution.step).filter_by(**key._asdict()).with_for_update())


def mark_stale(session: Session, key: StepKey, now_us: int) -> None:
    """Mark the step's attribution as stale; adds a row without a document if there is none."""
    upsert(session, Attribution, [{**key._asdict(), "stale": True, "changed_at_us": now_us}], _KEY)


def settle(session: Session, key: StepKey) -> None:
    """Take the mark off an attribution that cannot be computed again; its document stays."""
    session.execute(update(Attribution).filter_by(**key._asdict()).values(stale=False))


def put(session: Session, key: StepKey, document: dict[str, Any] | None, now_us: int) -> None:
    """Store the step's attribution as current."""
    row = {"stale": False, "changed_at_us": now_us, "document": document, "computed_at_us": now_us}
    upsert(session, Attribution, [{**key._asdict(), **row}], _KEY)


def newest_steps(session: Session, run_id: str, attempts: Sequence[AttemptStart], limit: int) -> Sequence[int]:
    """Return up to `limit` active steps that have replayed scores, the newest first."""
    chosen = is_active(attempts, Attribution.attempt, Attribution.step)
    query = select(Attribution.step).where(Attribution.run_id == run_id, chosen)
    return session.scalars(query.order_by(Attribution.step.desc()).limit(limit)).all()


def other_documents(
    session: Session, run_id: str, attempts: Sequence[AttemptStart], step: int, limit: int
) -> list[dict[str, Any]]:
    """Return the documents of up to `limit` active steps other than `step`, the newest ones, in step order."""
    chosen = is_active(attempts, Attribution.attempt, Attribution.step)
    query = (
        select(Attribution.document)
        .where(Attribution.run_id == run_id, Attribution.step != step, chosen, Attribution.computed_at_us.is_not(None))
        .order_by(Attribution.step.desc())
        .limit(limit)
    )
    return [document for document in reversed(session.scalars(query).all()) if document is not None]


def newest_documents(
    session: Session, run_id: str, attempts: Sequence[AttemptStart], limit: int
) -> list[tuple[StepKey, dict[str, Any] | None]]:
    """Return the documents of up to `limit` active steps that have been computed, the newest first."""
    chosen = is_active(attempts, Attribution.attempt, Attribution.step)
    query = (
        select(Attribution.attempt, Attribution.step, Attribution.document)
        .where(Attribution.run_id == run_id, chosen, Attribution.computed_at_us.is_not(None))
        .order_by(Attribution.step.desc())
        .limit(limit)
    )
    return [(StepKey(run_id, attempt, step), document) for attempt, step, document in session.execute(query)]


def stale_before(session: Session, before_us: int, limit: int) -> list[StepKey]:
    """Return up to `limit` steps whose attribution became stale before a time, the longest ago first."""
    query = (
        select(Attribution.run_id, Attribution.attempt, Attribution.step)
        .join(Run, Run.id == Attribution.run_id)
        .where(Attribution.stale, Attribution.changed_at_us < before_us, Run.deleted_at_us.is_(None))
        .order_by(Attribution.changed_at_us)
        .limit(limit)
    )
    return [StepKey(*row) for row in session.execute(query)]
