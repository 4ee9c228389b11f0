"""Queries on API keys."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import select
from sqlalchemy.orm import Session

from service.platform.database.dialect import table_of
from service.platform.database.tables import ApiKey

# Asked for every request without a key: built once.
_ANY = select(table_of(ApiKey).c.id).limit(1)


def find(session: Session, key_id: str) -> ApiKey | None:
    """Return the key with this id."""
    return session.get(ApiKey, key_id)


def find_by_hash(session: Session, secret_hash: str) -> ApiKey | None:
    """Return the key whose secret has this hash."""
    return session.scalar(select(ApiKey).where(ApiKey.secret_hash == secret_hash))


def any_exists(session: Session) -> bool:
    """Return whether there is any key, revoked ones included."""
    return session.scalar(_ANY) is not None


def all_keys(session: Session) -> Sequence[ApiKey]:
    """Return every key, oldest first."""
    return session.scalars(select(ApiKey).order_by(ApiKey.created_at_us, ApiKey.id)).all()
