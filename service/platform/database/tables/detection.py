"""Replays of the detectors that late data made due, open steps of runs that log scalars only, rules of runs."""

from __future__ import annotations

from sqlalchemy import ForeignKey
from sqlalchemy.orm import Mapped, mapped_column

from foreshock_service.platform.database.tables.base import Base


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
