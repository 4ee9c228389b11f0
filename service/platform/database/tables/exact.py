"""Exact divergences of pairs of scorers: the uploads of workers, and what is published of them."""

from __future__ import annotations

from typing import Any

from sqlalchemy import ForeignKey, ForeignKeyConstraint, Index
from sqlalchemy.orm import Mapped, mapped_column

from foreshock_service.platform.database.tables.base import Base


class ExactShard(Base):
    """The catalogue of uploaded divergences: a row here is an upload's commit point. `file` is relative to the store.

    `pair` is the comparison `target/behaviour`. Shards belong to the try (`token`) that sent them; they count once that
    try completed its job.
    """

    __tablename__ = "exact_shards"

    job_id: Mapped[str] = mapped_column(ForeignKey("probe_jobs.id"), primary_key=True)
    token: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    pair: Mapped[str] = mapped_column(primary_key=True)
    shard: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    digest: Mapped[str]
    body_bytes: Mapped[int]
    file: Mapped[str]
    rollouts: Mapped[int]
    tokens: Mapped[int]
    target_fingerprint_digest: Mapped[str]
    target_fingerprint: Mapped[dict[str, Any]]
    behaviour_fingerprint_digest: Mapped[str]
    behaviour_fingerprint: Mapped[dict[str, Any]]
    received_at_us: Mapped[int]


class ExactDivergence(Base):
    """The finished divergences of a pair at a step: the job and try that made them, and their measures.

    `measures` is an `ExactMeasuresRead` of `service/replay/results/exact_schemas.py`.
    """

    __tablename__ = "exact_divergences"
    __table_args__ = (
        ForeignKeyConstraint(["run_id", "attempt", "step"], ["steps.run_id", "steps.attempt", "steps.step"]),
        Index(None, "job_id"),
    )

    run_id: Mapped[str] = mapped_column(primary_key=True)
    attempt: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    step: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    rollout_set_digest: Mapped[str] = mapped_column(primary_key=True)
    pair: Mapped[str] = mapped_column(primary_key=True)
    target_fingerprint_digest: Mapped[str] = mapped_column(primary_key=True)
    behaviour_fingerprint_digest: Mapped[str] = mapped_column(primary_key=True)
    target_fingerprint: Mapped[dict[str, Any]]
    behaviour_fingerprint: Mapped[dict[str, Any]]
    job_id: Mapped[str] = mapped_column(ForeignKey("probe_jobs.id"))
    token: Mapped[int]
    accelerator: Mapped[str]
    device_name: Mapped[str]
    rollouts: Mapped[int]
    tokens: Mapped[int]
    from_sample: Mapped[bool]
    measures: Mapped[dict[str, Any]]
    published_at_us: Mapped[int]
