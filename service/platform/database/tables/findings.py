"""What is concluded from the stored data of a run, by source and name, and which of it has to be read anew."""

from __future__ import annotations

from typing import Any

from sqlalchemy import ForeignKey, Index
from sqlalchemy.orm import Mapped, mapped_column

from foreshock_service.platform.database.tables.base import Base, JsonColumn


class StoredFinding(Base):
    """A finding over the active steps of a run. `sentence` and `confidence` are those of `newest_step`."""

    __tablename__ = "findings"
    __table_args__ = (Index(None, "changed_at_us", "run_id", "source", "name"),)

    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id"), primary_key=True)
    source: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(primary_key=True)
    severity: Mapped[str]
    title: Mapped[str]
    sentence: Mapped[str]
    remedy: Mapped[str | None]
    steps: Mapped[int]
    first_step: Mapped[int]
    newest_step: Mapped[int]
    confidence: Mapped[dict[str, Any] | None] = mapped_column(JsonColumn)
    changed_at_us: Mapped[int]


class DueFindings(Base):
    """The findings of this source must be read anew from the run's steps.

    `changes` grows with every change of the steps, so that what was read before one is not stored.
    """

    __tablename__ = "due_findings"

    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id"), primary_key=True)
    source: Mapped[str] = mapped_column(primary_key=True)
    changes: Mapped[int]
