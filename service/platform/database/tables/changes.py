"""Setups of a run, and changes that its trainer announced."""

from __future__ import annotations

from typing import Any

from sqlalchemy import ForeignKey, ForeignKeyConstraint, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column

from foreshock_service.platform.database.tables.base import Base


class RunSetup(Base):
    """A setup that shards of a run name, as JSON. `steps.setups` lists the numbers, which count from 1."""

    __tablename__ = "run_setups"
    __table_args__ = (UniqueConstraint("run_id", "digest"),)

    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id"), primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    digest: Mapped[str]
    setup: Mapped[str]


class AnnouncedChange(Base):
    """A change that the trainer announced; `values` has `before` and `after`, as far as it gave them."""

    __tablename__ = "announced_changes"
    __table_args__ = (ForeignKeyConstraint(["run_id", "attempt"], ["attempts.run_id", "attempts.attempt"]),)

    run_id: Mapped[str] = mapped_column(primary_key=True)
    attempt: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    step: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    kind: Mapped[str] = mapped_column(primary_key=True)
    note: Mapped[str | None]
    values: Mapped[dict[str, Any]]
    announced_at_us: Mapped[int]
