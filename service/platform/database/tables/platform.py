"""What belongs to the service itself: the audit, API keys, background jobs."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, ForeignKey, Index, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column

from foreshock_service.platform.database.tables.base import Base, JsonColumn


class AuditEntry(Base):
    """One action. `actor` is a key's id, or `anonymous`, `service`, `console:<user>`; it never holds a secret.

    `project` NULL: an action on the whole service. `run_id` has no foreign key: entries outlive their runs.
    """

    __tablename__ = "audit_entries"
    __table_args__ = (
        Index(None, "at_us", "id"),
        Index(None, "project", "at_us", "id"),
        Index(None, "run_id", "at_us", "id"),
    )

    id: Mapped[str] = mapped_column(primary_key=True)
    at_us: Mapped[int]
    actor: Mapped[str]
    action: Mapped[str]
    subject: Mapped[str]
    project: Mapped[str | None]
    run_id: Mapped[str | None]
    before: Mapped[dict[str, Any] | None] = mapped_column(JsonColumn)
    after: Mapped[dict[str, Any] | None] = mapped_column(JsonColumn)
    request_id: Mapped[str | None]


def make_append_only(connection: Connection) -> None:
    """Make the triggers that refuse to change or delete an entry; part of the first migration."""
    if connection.dialect.name == "sqlite":
        for change in ("UPDATE", "DELETE"):
            connection.exec_driver_sql(
                f"CREATE TRIGGER audit_entries_no_{change.lower()} BEFORE {change} ON audit_entries "
                "BEGIN SELECT RAISE(ABORT, 'the audit is append-only'); END"
            )
        return
    connection.exec_driver_sql(
        "CREATE FUNCTION audit_is_append_only() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN RAISE EXCEPTION 'the audit is append-only'; END $$"
    )
    connection.exec_driver_sql(
        "CREATE TRIGGER audit_entries_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON audit_entries "
        "FOR EACH STATEMENT EXECUTE FUNCTION audit_is_append_only()"
    )


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
