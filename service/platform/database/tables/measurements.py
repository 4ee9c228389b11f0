"""What is measured and logged of a step: measurements and their statistics, scalars, verdicts of the lint, findings."""

from __future__ import annotations

from typing import Any

from sqlalchemy import BigInteger, Boolean, Column, Double, ForeignKey, ForeignKeyConstraint, Index, String, Table
from sqlalchemy.orm import Mapped, mapped_column

from foreshock.measures.registry import MEASURES
from foreshock_service.platform.database.tables.base import Base, CompressedBytes, CompressedJson, JsonColumn

MEASUREMENT_KEY = ("run_id", "attempt", "step", "comparison")

# NULL: not estimable, or not of this kind of comparison.
measurements = Table(
    "measurements",
    Base.metadata,
    Column("run_id", String, primary_key=True),
    Column("attempt", BigInteger, primary_key=True, autoincrement=False),
    Column("step", BigInteger, primary_key=True, autoincrement=False),
    Column("comparison", String, primary_key=True),
    *(Column(measure.column, Double) for measure in MEASURES),
    # True if only some of the step's rollouts were compared, as in a probe of a sample.
    Column("from_sample", Boolean, nullable=False),
    Column("computed_at_us", BigInteger, nullable=False),
    ForeignKeyConstraint(["run_id", "attempt"], ["attempts.run_id", "attempts.attempt"]),
)


class MeasurementStatistics(Base):
    """The folded statistics that a measurement row was computed from; buckets and sequence measures come from them."""

    __tablename__ = "measurement_statistics"
    __table_args__ = (ForeignKeyConstraint(["run_id", "attempt"], ["attempts.run_id", "attempts.attempt"]),)

    run_id: Mapped[str] = mapped_column(primary_key=True)
    attempt: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    step: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    comparison: Mapped[str] = mapped_column(primary_key=True)
    statistics_version: Mapped[int]
    statistics: Mapped[bytes] = mapped_column(CompressedBytes)
    summaries: Mapped[bytes | None] = mapped_column(CompressedBytes)


class NewestMeasurement(Base):
    """The newest step that has a comparison, in the newest attempt that has one: what /metrics shows of the run.

    `revision` grows whenever a measurement of the comparison is stored; `rewritten` is its value at the last one that
    was not of a newer step. `buckets`: tokens, then mean k3, float64, of each bucket of probability; NULL if not kept.
    """

    __tablename__ = "newest_measurements"
    __table_args__ = (ForeignKeyConstraint(["run_id", "attempt"], ["attempts.run_id", "attempts.attempt"]),)

    run_id: Mapped[str] = mapped_column(primary_key=True)
    comparison: Mapped[str] = mapped_column(primary_key=True)
    attempt: Mapped[int]
    step: Mapped[int]
    revision: Mapped[int]
    rewritten: Mapped[int]
    buckets: Mapped[bytes | None]


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
