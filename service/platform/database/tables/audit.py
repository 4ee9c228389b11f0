"""The audit: who changed what. Triggers of both databases refuse to change or delete a row."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, Index
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
