"""API keys; only their hash is kept."""

from __future__ import annotations

from sqlalchemy import UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column

from service.platform.database.tables.base import Base


class ApiKey(Base):
    """`project` NULL: every project. A revoked key is kept, so that a service that had keys stays closed."""

    __tablename__ = "api_keys"
    __table_args__ = (UniqueConstraint("secret_hash"),)

    id: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str]
    project: Mapped[str | None]
    scopes: Mapped[list[str]]
    secret_hash: Mapped[str]
    created_at_us: Mapped[int]
    revoked_at_us: Mapped[int | None]
