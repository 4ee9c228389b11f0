"""Results of the semantics lint: the mergeable evidence of each shard, and the verdict on each closed step."""

from __future__ import annotations

from typing import Any

from sqlalchemy import ForeignKeyConstraint, Index
from sqlalchemy.orm import Mapped, mapped_column

from foreshock_service.platform.database.tables.base import Base, CompressedBytes, CompressedJson


class ShardLint(Base):
    """The evidence of one shard, and examples by check."""

    __tablename__ = "shard_lint"
    __table_args__ = (
        ForeignKeyConstraint(
            ["run_id", "attempt", "step", "shard"],
            ["shards.run_id", "shards.attempt", "shards.step", "shards.shard"],
        ),
    )

    run_id: Mapped[str] = mapped_column(primary_key=True)
    attempt: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    step: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    shard: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    statistics_version: Mapped[int]
    evidence: Mapped[bytes] = mapped_column(CompressedBytes)
    examples: Mapped[dict[str, Any]]


class StepLint(Base):
    """The verdict on a closed step: its report, the severity of each warning by its name (`severity`: of the worst,
    NULL: there is none), and the sums of its surprisal test, which add up over the steps of a run."""

    __tablename__ = "step_lint"
    __table_args__ = (
        ForeignKeyConstraint(["run_id", "attempt", "step"], ["steps.run_id", "steps.attempt", "steps.step"]),
        Index(None, "run_id", "severity"),
    )

    run_id: Mapped[str] = mapped_column(primary_key=True)
    attempt: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    step: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    severity: Mapped[str | None]
    warnings: Mapped[dict[str, Any]]
    report: Mapped[dict[str, Any]] = mapped_column(CompressedJson)
    surprisal_tokens: Mapped[int]
    surprisal: Mapped[float]
    entropy: Mapped[float]
    surprisal_variance: Mapped[float]
    largest_surprisal: Mapped[float]
