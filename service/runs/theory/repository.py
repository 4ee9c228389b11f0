"""Queries on what theory needs beside measurements."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import select
from sqlalchemy.orm import Session

from service.platform.database.tables import AdviceAcknowledgement


@dataclass(frozen=True, slots=True)
class AppliedLearningRate:
    """The learning rate that a trainer acknowledged at a step."""

    step: int
    learning_rate: float | None


def applied_learning_rate(session: Session, run_id: str, attempt: int, step: int) -> AppliedLearningRate | None:
    """Return what the attempt's trainer acknowledged at this step, or last before it; None if it never did."""
    query = select(AdviceAcknowledgement.step, AdviceAcknowledgement.applied_learning_rate).where(
        AdviceAcknowledgement.run_id == run_id,
        AdviceAcknowledgement.attempt == attempt,
        AdviceAcknowledgement.step <= step,
    )
    row = session.execute(query.order_by(AdviceAcknowledgement.step.desc()).limit(1)).first()
    return None if row is None else AppliedLearningRate(*row)
