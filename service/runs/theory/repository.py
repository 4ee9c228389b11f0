"""Queries for inputs of the theory that are not measurements."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import select
from sqlalchemy.orm import Session

from foreshock_service.platform.database.tables import AdviceAcknowledgement


@dataclass(frozen=True, slots=True)
class AppliedLearningRate:
    """Learning rate that a trainer acknowledged at a step."""

    step: int
    learning_rate: float | None


def applied_learning_rate(session: Session, run_id: str, attempt: int, step: int) -> AppliedLearningRate | None:
    """Return the newest rate that the attempt's trainer acknowledged up to this step; None if there is none."""
    query = select(AdviceAcknowledgement.step, AdviceAcknowledgement.applied_learning_rate).where(
        AdviceAcknowledgement.run_id == run_id,
        AdviceAcknowledgement.attempt == attempt,
        AdviceAcknowledgement.step <= step,
    )
    row = session.execute(query.order_by(AdviceAcknowledgement.step.desc()).limit(1)).first()
    return None if row is None else AppliedLearningRate(*row)
