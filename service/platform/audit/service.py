"""Record and list what people and keys changed. Callers pass names and states, never secrets or rollouts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, cast

from sqlalchemy.orm import Session

from foreshock.api.records import from_attributes
from foreshock.api.service import AuditRecord
from foreshock.clock import now_us
from foreshock_service.platform.audit import repository
from foreshock_service.platform.database.dialect import insert_rows
from foreshock_service.platform.database.tables import AuditEntry
from foreshock_service.platform.identifiers import new_identifier
from foreshock_service.platform.pagination import CursorKey, Page, decode_cursor, page_of


class Author(Protocol):
    """Who acts: `foreshock_service.platform.security.Principal`, or an `Actor`."""

    @property
    def actor(self) -> str:
        """A key's id, `anonymous`, `service`, or `console:<user>`."""

    @property
    def request_id(self) -> str | None:
        """The request that asked for it."""


@dataclass(frozen=True, slots=True)
class Actor:
    """Someone who acts without a request."""

    actor: str
    request_id: str | None = None


BY_SERVICE = Actor("service")


def record(
    session: Session,
    author: Author,
    action: str,
    subject: str,
    *,
    project: str | None = None,
    run_id: str | None = None,
    before: Mapping[str, Any] | None = None,
    after: Mapping[str, Any] | None = None,
) -> None:
    """Append an entry in the transaction of the change: `action` is `noun.verb`, `subject` the id of what changed."""
    row = {
        "id": new_identifier("audit"),
        "at_us": now_us(),
        "actor": author.actor,
        "action": action,
        "subject": subject,
        "project": project,
        "run_id": run_id,
        "before": dict(before) if before is not None else None,
        "after": dict(after) if after is not None else None,
        "request_id": author.request_id,
    }
    insert_rows(session, AuditEntry, [row])


def list_entries(
    session: Session, project: str | None, filters: Mapping[str, str | None], cursor: str | None, limit: int
) -> Page[AuditRecord]:
    """Return one page of entries, newest first; `project`: those of one project alone."""
    after = cast("tuple[int, str]", decode_cursor(cursor, (int, str))) if cursor is not None else None
    rows = repository.newest_first(session, project, filters, after, limit + 1)
    return page_of([from_attributes(AuditRecord, row) for row in rows], limit, _key_of)


def _key_of(entry: AuditRecord) -> CursorKey:
    return (entry.at_us, entry.id)
