"""Files and rollouts that were deleted: files that wait for their removal, and requests to delete rollouts."""

from __future__ import annotations

from sqlalchemy import ForeignKey, Index
from sqlalchemy.orm import Mapped, mapped_column

from foreshock_service.platform.database.tables.base import Base


class FileRemoval(Base):
    """A file of the token store that no other row names, removed once `due_at_us` is past.

    It outlives its run: a run's rows may be deleted before its files.
    """

    __tablename__ = "file_removals"
    __table_args__ = (Index(None, "due_at_us"),)

    file: Mapped[str] = mapped_column(primary_key=True)
    file_bytes: Mapped[int]
    reason: Mapped[str]
    due_at_us: Mapped[int]


class Deletion(Base):
    """A request to delete rollouts of a run by their ids. It stays in force for rollouts that arrive later.

    The ids themselves are not kept, only their digests. Until `finished_at_us` is set the stored steps beyond
    (`attempt`, `step`) are not searched yet.
    """

    __tablename__ = "deletions"
    __table_args__ = (Index(None, "run_id", "requested_at_us"), Index(None, "finished_at_us"))

    id: Mapped[str] = mapped_column(primary_key=True)
    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id"))
    sample_digests: Mapped[list[str]]
    group_digests: Mapped[list[str]]
    attempt: Mapped[int]
    step: Mapped[int]
    steps: Mapped[int]
    rollouts: Mapped[int]
    files: Mapped[int]
    requested_at_us: Mapped[int]
    finished_at_us: Mapped[int | None]
