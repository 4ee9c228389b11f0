"""The outbox of notifications: what is still to be sent to which target."""

from __future__ import annotations

from sqlalchemy import Index, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column

from foreshock_service.platform.database.tables.base import Base


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
