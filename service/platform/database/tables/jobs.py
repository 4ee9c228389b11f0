"""Background jobs: which process does one, and how its last run went."""

from __future__ import annotations

from sqlalchemy.orm import Mapped, mapped_column

from foreshock_service.platform.database.tables.base import Base


class BackgroundJob(Base):
    """A periodic job of all service processes. While one does it, `leased_until_us` is in the future.

    `holder` names the process that did it last.
    """

    __tablename__ = "background_jobs"

    name: Mapped[str] = mapped_column(primary_key=True)
    holder: Mapped[str]
    leased_until_us: Mapped[int]
    started_at_us: Mapped[int]
    finished_at_us: Mapped[int | None]
    runs: Mapped[int]
    error: Mapped[str | None]
