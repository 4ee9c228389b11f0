"""Checkpoints that a run announced: the locations of the weights that sampled a step."""

from __future__ import annotations

from sqlalchemy import ForeignKeyConstraint
from sqlalchemy.orm import Mapped, mapped_column

from foreshock_service.platform.database.tables.base import Base


class Checkpoint(Base):
    """Weights under a root that the worker's own configuration names; `path` is relative to it."""

    __tablename__ = "checkpoints"
    __table_args__ = (ForeignKeyConstraint(["run_id", "attempt"], ["attempts.run_id", "attempts.attempt"]),)

    run_id: Mapped[str] = mapped_column(primary_key=True)
    attempt: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    step: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    root: Mapped[str]
    path: Mapped[str]
    format: Mapped[str]
    digest: Mapped[str]
    model_kind: Mapped[str | None]
    weights_version: Mapped[int | None]
    expires_at_us: Mapped[int | None]
    announced_at_us: Mapped[int]
