"""API keys, of which only hashes are kept, and the page sessions that were ended before their time."""

from __future__ import annotations

from sqlalchemy import ForeignKey, Index, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column

from foreshock_service.platform.database.tables.base import Base


class ApiKey(Base):
    """`project` NULL: every project. A revoked key is kept, so that a service that had keys stays closed.

    `last_used_at_us` is written at most once a minute. Page sessions signed before `sessions_from_us` have ended.
    """

    __tablename__ = "api_keys"
    __table_args__ = (UniqueConstraint("secret_hash"),)

    id: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str]
    project: Mapped[str | None]
    scopes: Mapped[list[str]]
    secret_hash: Mapped[str]
    created_at_us: Mapped[int]
    revoked_at_us: Mapped[int | None]
    expires_at_us: Mapped[int | None]
    last_used_at_us: Mapped[int | None]
    sessions_from_us: Mapped[int] = mapped_column(server_default="0")


class RetiredSecret(Base):
    """The hash of a secret that a rotation replaced; it is valid until `valid_until_us`, and kept for ever."""

    __tablename__ = "retired_secrets"

    secret_hash: Mapped[str] = mapped_column(primary_key=True)
    key_id: Mapped[str] = mapped_column(ForeignKey("api_keys.id"))
    valid_until_us: Mapped[int]


class EndedSession(Base):
    """A page session that was ended by logging out; the row goes when the session would have expired."""

    __tablename__ = "ended_sessions"
    __table_args__ = (Index(None, "expires_at_us"),)

    session_hash: Mapped[str] = mapped_column(primary_key=True)
    expires_at_us: Mapped[int]
