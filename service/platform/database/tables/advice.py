"""Advice on the learning rate: the append-only log of decisions, and the acknowledgements of trainers."""

from __future__ import annotations

from typing import Any

from sqlalchemy import ForeignKey, ForeignKeyConstraint
from sqlalchemy.orm import Mapped, mapped_column

from foreshock_service.platform.database.tables.base import Base


class AdviceDecision(Base):
    """One decision; rows are added, never changed. `decision` holds all of it; the columns are for queries."""

    __tablename__ = "advice_decisions"

    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id"), primary_key=True)
    revision: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    attempt: Mapped[int]
    kind: Mapped[str]
    effective_from_step: Mapped[int]
    reason: Mapped[str]
    author: Mapped[str]
    made_at_us: Mapped[int]
    decision: Mapped[dict[str, Any]]


class AdviceAcknowledgement(Base):
    """The learning rate and the scale that a trainer reported for a step, and the revision of the advice it used."""

    __tablename__ = "advice_acknowledgements"
    __table_args__ = (ForeignKeyConstraint(["run_id", "attempt"], ["attempts.run_id", "attempts.attempt"]),)

    run_id: Mapped[str] = mapped_column(primary_key=True)
    attempt: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    step: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    revision: Mapped[int]
    applied_learning_rate: Mapped[float]
    applied_scale: Mapped[float | None]
    received_at_us: Mapped[int]


class TrainerProgress(Base):
    """The newest step for which a following trainer requested, and so received, a scale."""

    __tablename__ = "trainer_progress"
    __table_args__ = (ForeignKeyConstraint(["run_id", "attempt"], ["attempts.run_id", "attempts.attempt"]),)

    run_id: Mapped[str] = mapped_column(primary_key=True)
    attempt: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    polled_step: Mapped[int]
