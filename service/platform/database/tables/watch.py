"""Alerts, the states of the detectors, rules of runs, advice on the learning rate, and notifications."""

from __future__ import annotations

from typing import Any

from sqlalchemy import ForeignKey, ForeignKeyConstraint, Index, UniqueConstraint
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


class DueReplay(Base):
    """The detection of a run is to be derived again from `from_step` on.

    `changed_step` is the first step that changed since a derivation began, so that an older history is not stored.
    """

    __tablename__ = "due_replays"

    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id"), primary_key=True)
    from_step: Mapped[int]
    changed_step: Mapped[int]


class ScalarTail(Base):
    """The newest step that has watched scalars of a run without rollouts: no later step closes it.

    It closes `FORESHOCK_STEP_GRACE_SECONDS` after its last scalars, or when the run ends; `closed` is true then.
    """

    __tablename__ = "scalar_tails"

    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id"), primary_key=True)
    attempt: Mapped[int]
    step: Mapped[int]
    received_at_us: Mapped[int]
    closed: Mapped[bool]


class RulesVersion(Base):
    """A change of a run's rules, as the file that was sent; versions of a run count from 1."""

    __tablename__ = "rules_versions"

    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id"), primary_key=True)
    version: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    effective_from_step: Mapped[int]
    toml: Mapped[str]
    made_at_us: Mapped[int]


class AdviceDecision(Base):
    """One decision; rows are added, never changed. `decision` holds all of it; the columns are for queries."""

    __tablename__ = "advice_decisions"

    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id"), primary_key=True)
    revision: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    attempt: Mapped[int]
    kind: Mapped[str]
    effective_from_step: Mapped[int]
    reason: Mapped[str]
    author: Mapped[str]
    made_at_us: Mapped[int]
    decision: Mapped[dict[str, Any]]


class AdviceAcknowledgement(Base):
    """The learning rate and the scale that a trainer reported for a step, and the revision of the advice it used."""

    __tablename__ = "advice_acknowledgements"
    __table_args__ = (ForeignKeyConstraint(["run_id", "attempt"], ["attempts.run_id", "attempts.attempt"]),)

    run_id: Mapped[str] = mapped_column(primary_key=True)
    attempt: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    step: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    revision: Mapped[int]
    applied_learning_rate: Mapped[float]
    applied_scale: Mapped[float | None]
    received_at_us: Mapped[int]


class TrainerProgress(Base):
    """The newest step for which a following trainer requested, and so received, a scale."""

    __tablename__ = "trainer_progress"
    __table_args__ = (ForeignKeyConstraint(["run_id", "attempt"], ["attempts.run_id", "attempts.attempt"]),)

    run_id: Mapped[str] = mapped_column(primary_key=True)
    attempt: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    polled_step: Mapped[int]


class Notification(Base):
    """The message to one target that an alert was opened or resolved; one of each in the life of an alert.

    `state` is `pending`, `sent`, `dropped` (there is nothing to say any more) or `failed`. While a process sends it,
    `leased_until_us` is in the future and `lease` is a random name of this try.
    """

    __tablename__ = "notifications"
    __table_args__ = (
        UniqueConstraint("target", "alert_id", "change"),
        Index(None, "target", "state", "due_at_us"),
    )

    id: Mapped[str] = mapped_column(primary_key=True)
    target: Mapped[str]
    alert_id: Mapped[str]
    change: Mapped[str]
    state: Mapped[str]
    tries: Mapped[int]
    due_at_us: Mapped[int]
    lease: Mapped[str | None]
    leased_until_us: Mapped[int]
    error: Mapped[str | None]
    created_at_us: Mapped[int]
    sent_at_us: Mapped[int | None]
