"""Alerts, and the snapshots of the detectors' state from which a late step is derived again."""

from __future__ import annotations

from typing import Any

from sqlalchemy import ForeignKeyConstraint, Index, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column

from foreshock_service.platform.database.tables.base import Base, CompressedBytes


class Alert(Base):
    """A rule that fired at a step. `version` increases with every change of any alert of the run.

    `changed_by` is `detector`, `operator` or `rewind`; `cleared_step` is the step at which the rule no longer fired.
    """

    __tablename__ = "alerts"
    __table_args__ = (
        ForeignKeyConstraint(["run_id", "attempt"], ["attempts.run_id", "attempts.attempt"]),
        UniqueConstraint("run_id", "attempt", "rule", "step"),
        Index(None, "run_id", "state"),
        Index(None, "run_id", "version"),
        Index(None, "run_id", "step"),
        Index(None, "run_id", "cleared_step"),
        Index(None, "changed_at_us"),
    )

    id: Mapped[str] = mapped_column(primary_key=True)
    run_id: Mapped[str]
    attempt: Mapped[int]
    rule: Mapped[str]
    step: Mapped[int]
    severity: Mapped[str]
    value: Mapped[float]
    threshold: Mapped[float]
    why: Mapped[str]
    what_to_do: Mapped[str]
    moves_learning_rate: Mapped[bool]
    evidence: Mapped[dict[str, Any]]
    state: Mapped[str]
    cleared_step: Mapped[int | None]
    changed_by: Mapped[str]
    version: Mapped[int]
    opened_at_us: Mapped[int]
    changed_at_us: Mapped[int]


class DetectorSnapshot(Base):
    """The detectors' state after a step of the active history; those with `milestone` are kept.

    A state is derived again if it is missing, or of another release.
    """

    __tablename__ = "detector_snapshots"
    __table_args__ = (
        ForeignKeyConstraint(["run_id", "attempt"], ["attempts.run_id", "attempts.attempt"]),
        Index(None, "run_id", "step"),
        Index(None, "run_id", "milestone", "step"),
    )

    run_id: Mapped[str] = mapped_column(primary_key=True)
    attempt: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    step: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    configuration_digest: Mapped[str]
    milestone: Mapped[bool]
    state: Mapped[bytes] = mapped_column(CompressedBytes)
