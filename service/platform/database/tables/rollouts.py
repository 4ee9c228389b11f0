"""Steps, the catalogue of their shards, and the mergeable statistics of each shard."""

from __future__ import annotations

from sqlalchemy import ForeignKeyConstraint, Index, text
from sqlalchemy.orm import Mapped, mapped_column

from foreshock_service.platform.database.tables.base import Base, CompressedBytes

_UNFOLDED = text("folded_shards < received_shards")
_INCOMPLETE = text("closed_at_us IS NOT NULL AND received_shards < expected_shards")
_SENT_AS_STATISTICS = text("full_rollouts IS NOT NULL")


class Step(Base):
    """All rollouts of one training step in one attempt; `closed_at_us` is set once it is folded.

    `folded_shards` is the number of shards that its measurements are of. While it is below `received_shards` the step
    is open, or a late shard waits to be folded.
    """

    __tablename__ = "steps"
    __table_args__ = (
        ForeignKeyConstraint(["run_id", "attempt"], ["attempts.run_id", "attempts.attempt"]),
        Index("ix_steps_unfolded", "last_shard_at_us", sqlite_where=_UNFOLDED, postgresql_where=_UNFOLDED),
        # Few steps are in these; each answer with curves says which.
        Index(
            "ix_steps_incomplete", "run_id", "attempt", "step", sqlite_where=_INCOMPLETE, postgresql_where=_INCOMPLETE
        ),
        Index(
            "ix_steps_sent_as_statistics",
            "run_id",
            "attempt",
            "step",
            sqlite_where=_SENT_AS_STATISTICS,
            postgresql_where=_SENT_AS_STATISTICS,
        ),
    )

    run_id: Mapped[str] = mapped_column(primary_key=True)
    attempt: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    step: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    expected_shards: Mapped[int]
    received_shards: Mapped[int]
    folded_shards: Mapped[int]
    rollouts: Mapped[int]
    tokens: Mapped[int]
    # NULL: all rollouts of the step are stored in full; otherwise those that are, and their response tokens.
    full_rollouts: Mapped[int | None]
    full_tokens: Mapped[int | None]
    # Numbers of the shards' setups, ascending, with commas; NULL: no shard names one.
    setups: Mapped[str | None]
    first_shard_at_us: Mapped[int]
    last_shard_at_us: Mapped[int]
    closed_at_us: Mapped[int | None]
    # Set by retention: the tokens of all its shards are purged.
    tokens_purged_at_us: Mapped[int | None]


class Shard(Base):
    """The catalogue: a row here is the commit point of an upload. `file` is relative to the token store.

    `tokens_removed` is why `file` is no longer in the store, `retention` or `deletion`; NULL: it is. `deleted_rollouts`
    counts the rollouts that were deleted, `tokens_changed_at_us` is when the tokens last became fewer.
    """

    __tablename__ = "shards"
    __table_args__ = (
        ForeignKeyConstraint(["run_id", "attempt", "step"], ["steps.run_id", "steps.attempt", "steps.step"]),
    )

    run_id: Mapped[str] = mapped_column(primary_key=True)
    attempt: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    step: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    shard: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    digest: Mapped[str]
    body_bytes: Mapped[int]
    file: Mapped[str]
    file_bytes: Mapped[int]
    rollouts: Mapped[int]
    tokens: Mapped[int]
    # NULL: `file` holds all rollouts; otherwise those that it holds, beside statistics that the client sent. The first
    # `sampled_rollouts` of them are an unbiased sample.
    full_rollouts: Mapped[int | None]
    full_tokens: Mapped[int | None]
    sampled_rollouts: Mapped[int | None]
    deleted_rollouts: Mapped[int | None]
    tokens_removed: Mapped[str | None]
    tokens_changed_at_us: Mapped[int | None]
    rollout_set_digest: Mapped[str]
    received_at_us: Mapped[int]


class ShardStatistics(Base):
    """Statistics of one shard: one row per comparison (`rollout` for lengths, rewards and the like).

    A shard that is the whole step has no rows: the step's `measurement_statistics` holds the same bytes. Older steps
    have rows for it, with `statistics` NULL.
    """

    __tablename__ = "shard_statistics"
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
    comparison: Mapped[str] = mapped_column(primary_key=True)
    statistics_version: Mapped[int]
    statistics: Mapped[bytes | None] = mapped_column(CompressedBytes)
    summaries: Mapped[bytes | None] = mapped_column(CompressedBytes)
