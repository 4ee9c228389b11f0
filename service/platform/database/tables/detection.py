"""Replays of the detectors that late data made due."""

from __future__ import annotations

from sqlalchemy import ForeignKey
from sqlalchemy.orm import Mapped, mapped_column

from service.platform.database.tables.base import Base


class DueReplay(Base):
    """The history of a run changed at `from_step`, and more steps follow than are replayed at once.

    `changes` grows with every change, so that a replay of an older history is not stored.
    """

    __tablename__ = "due_replays"

    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id"), primary_key=True)
    from_step: Mapped[int]
    changes: Mapped[int]
