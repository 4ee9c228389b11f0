"""Curves: one wide table with a column per registered measure, and beside it the folded statistics of each row."""

from __future__ import annotations

from sqlalchemy import BigInteger, Boolean, Column, Double, ForeignKeyConstraint, String, Table
from sqlalchemy.orm import Mapped, mapped_column

from foreshock.measures.registry import MEASURES
from foreshock_service.platform.database.tables.base import Base, CompressedBytes

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
