"""Policies of automatic probes, and the probes that they made."""

from __future__ import annotations

from typing import Any

from sqlalchemy import ForeignKey, Index
from sqlalchemy.orm import Mapped, mapped_column

from foreshock_service.platform.database.tables.base import Base


class ProbePolicy(Base):
    """Which steps of a run are probed automatically, as it was sent; a run without a row has no automatic probes."""

    __tablename__ = "probe_policies"

    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id"), primary_key=True)
    policy: Mapped[dict[str, Any]]
    changed_at_us: Mapped[int]


class PolicyProbe(Base):
    """A step for which the policy made a probe, once. `cause` is `step` or `alert`.

    `problem` is set if the step could not be probed (`probe_id` None), or if the budget ended its queued jobs.
    """

    __tablename__ = "policy_probes"
    __table_args__ = (Index(None, "probe_id"),)

    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id"), primary_key=True)
    attempt: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    step: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    cause: Mapped[str]
    probe_id: Mapped[str | None] = mapped_column(ForeignKey("probes.id"))
    problem: Mapped[str | None]
    made_at_us: Mapped[int]
