"""Runs and their attempts."""

from __future__ import annotations

from typing import Any

from sqlalchemy import ForeignKey, Index, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column

from service.platform.database.tables.base import Base


class Run(Base):
    """One training job. `deleted_at_us` set: a tombstone, so that late uploads are told 410."""

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
    advice_mode: Mapped[str]
    state: Mapped[str]
    last_step: Mapped[int | None]
    created_at_us: Mapped[int]
    updated_at_us: Mapped[int]
    deleted_at_us: Mapped[int | None]


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
