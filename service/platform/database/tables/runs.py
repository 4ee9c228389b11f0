"""Runs and their attempts."""

from __future__ import annotations

from typing import Any, Literal

from sqlalchemy import ForeignKey, ForeignKeyConstraint, Index, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column

from foreshock.model_kind import ModelKind, known_model_kind
from foreshock_service.platform.database.tables.base import Base, JsonColumn


class Run(Base):
    """One training job. `deleted_at_us` set: a tombstone, so that late uploads are answered with 410.

    `rows_removed_at_us` is set once the rows of a deleted run are gone, and only the tombstone is left. `deletions`
    counts the requests to delete some of its rollouts. `retention` has its own rules, None: those of the settings.

    `seen_at_us` is the last sign of life of its clients, None if they send none. `rollouts` and `tokens` (of responses)
    count what was received, superseded steps included; they never fall. `scalar_names` are the run's own names of
    quantities that the detectors read, None: the well-known ones. `rules_version` is the newest version of its
    own rules.
    """

    __tablename__ = "runs"
    __table_args__ = (UniqueConstraint("project", "key"), Index(None, "created_at_us", "id"))

    id: Mapped[str] = mapped_column(primary_key=True)
    project: Mapped[str]
    key: Mapped[str]
    name: Mapped[str | None]
    model: Mapped[str | None]
    trainer: Mapped[str | None]
    engine: Mapped[str | None]
    hardware: Mapped[str | None]
    initial_learning_rate: Mapped[float | None]
    length_cap: Mapped[int | None]
    declared_model_kind: Mapped[str | None]
    derived_model_kind: Mapped[str | None]
    advice_mode: Mapped[str]
    state: Mapped[str]
    last_step: Mapped[int | None]
    rollouts: Mapped[int] = mapped_column(default=0, server_default="0")
    tokens: Mapped[int] = mapped_column(default=0, server_default="0")
    last_shard_at_us: Mapped[int | None]
    seen_at_us: Mapped[int | None]
    created_at_us: Mapped[int]
    updated_at_us: Mapped[int]
    deleted_at_us: Mapped[int | None]
    rows_removed_at_us: Mapped[int | None]
    deletions: Mapped[int] = mapped_column(server_default="0", default=0)
    retention: Mapped[dict[str, Any] | None] = mapped_column(JsonColumn)
    scalar_names: Mapped[dict[str, Any] | None] = mapped_column(JsonColumn)
    rules_version: Mapped[int | None]

    @property
    def model_kind(self) -> ModelKind | None:
        """Return the kind of the model: as declared, else as derived from an announced checkpoint, else None."""
        return known_model_kind(self.declared_model_kind) or known_model_kind(self.derived_model_kind)

    @property
    def model_kind_source(self) -> Literal["declared", "checkpoint"] | None:
        """Return the source of `model_kind`; None if it is unknown."""
        if self.model_kind is None:
            return None
        return "checkpoint" if known_model_kind(self.declared_model_kind) is None else "declared"


class Attempt(Base):
    """A run's start or resume; attempts of a run count from 1."""

    __tablename__ = "attempts"
    __table_args__ = (UniqueConstraint("run_id", "key"),)

    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id"), primary_key=True)
    attempt: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    key: Mapped[str]
    resume_step: Mapped[int]
    fingerprint: Mapped[dict[str, Any]]
    created_at_us: Mapped[int]


class AttemptClient(Base):
    """A client process that logs an attempt: its last sign of life, and the items that it could not deliver."""

    __tablename__ = "attempt_clients"
    __table_args__ = (
        ForeignKeyConstraint(["run_id", "attempt"], ["attempts.run_id", "attempts.attempt"]),
        Index(None, "run_id", "seen_at_us"),
    )

    run_id: Mapped[str] = mapped_column(primary_key=True)
    attempt: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    client: Mapped[str] = mapped_column(primary_key=True)
    shard: Mapped[int | None]
    undelivered: Mapped[int]
    rejected: Mapped[int]
    dropped: Mapped[int]
    invalid: Mapped[int]
    reason: Mapped[str | None]
    seen_at_us: Mapped[int]
