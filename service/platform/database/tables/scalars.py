"""Scalars that a source (the trainer, an engine) reports for a step."""

from __future__ import annotations

from sqlalchemy import ForeignKeyConstraint
from sqlalchemy.orm import Mapped, mapped_column

from foreshock_service.platform.database.tables.base import Base


class Scalar(Base):
    """One value; NULL if the source reported a number that is not finite."""

    __tablename__ = "scalars"
    __table_args__ = (ForeignKeyConstraint(["run_id", "attempt"], ["attempts.run_id", "attempts.attempt"]),)

    run_id: Mapped[str] = mapped_column(primary_key=True)
    attempt: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    step: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    source: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(primary_key=True)
    value: Mapped[float | None]
    received_at_us: Mapped[int]
